// What happens to a score between Q K^T and the softmax: a list of modifiers, applied in order.
//
// Scores arrive as the plain products q . k, and the softmax multiplies what leaves by `unit` inside the exponent, so
// that without modifiers softmax_scale costs nothing. A modifier may change the unit.
//
// Modifier::Of<kMTiles, kChunks> is one warp's copy, with three steps: it is made once per tile of rows, `fetch` starts
// loading what the next key tile needs before Q K^T hides the latency, `modify` changes one chunk of scores.
#pragma once

#include "core/tile.cuh"
#include "core/types.cuh"
#include "params.cuh"

namespace fa2 {

struct ScoreContext {
  const FwdParams& params;
  int batch, head;
  int first_row;  // of the warp
  int diagonal;   // of query i: key i + diagonal
  float unit;     // of the scores so far, to log2; changed by modifiers
};

struct Modifier {
  void fetch(int) {}
};

// Flips the sign. The softmax takes maxima before it scales, which is right for positive scales only: a negative
// softmax_scale is the positive one on flipped scores.
struct Negate {
  static constexpr bool kSigned = false;
  template <int kMTiles, int kChunks>
  struct Of : Modifier {
    explicit Of(ScoreContext&) {}
    void modify(ScoreChunk<kMTiles>& s, int, int) const {
      s.visit([](float& value, int, int) { value = -value; });
    }
  };
};

// s = softcap tanh(softmax_scale q . k / softcap). What leaves is the tanh; softcap is its unit.
struct Softcap {
  static constexpr bool kSigned = true;
  template <int kMTiles, int kChunks>
  struct Of : Modifier {
    float factor;
    explicit Of(ScoreContext& context) : factor(context.params.softmax_scale * __frcp_rn(context.params.softcap)) {
      context.unit = context.params.softcap * kLog2E;
    }
    void modify(ScoreChunk<kMTiles>& s, int, int) const {
      s.visit([&](float& value, int, int) { value = ptx::tanh(value * factor); });
    }
  };
};

// Brings scores to log2, so that others can be added.
struct Scaled {
  static constexpr bool kSigned = true;
  template <int kMTiles, int kChunks>
  struct Of : Modifier {
    float factor;
    explicit Of(ScoreContext& context) : factor(context.unit) { context.unit = 1.f; }
    void modify(ScoreChunk<kMTiles>& s, int, int) const {
      s.visit([&](float& value, int, int) { value *= factor; });
    }
  };
};

// Adds -slope |i + diagonal - j|.
struct Alibi {
  static constexpr bool kSigned = true;
  template <int kMTiles, int kChunks>
  struct Of : Modifier {
    float slope;
    int lane_distance;  // of the lane's first row and column, in a tile that begins at key 0

    explicit Of(ScoreContext& context)
        : lane_distance(context.first_row + fragment_row(0) + context.diagonal - fragment_col()) {
      const FwdParams& p = context.params;
      const float* slopes = reinterpret_cast<const float*>(p.alibi_slopes);
      slope = slopes[context.batch * p.alibi_stride_batch + context.head * p.alibi_stride_head] * -kLog2E;
    }
    void modify(ScoreChunk<kMTiles>& s, int chunk, int first_key) const {
      float distance[kMTiles * kRowsPerMTile];
#pragma unroll
      for (int r = 0; r < kMTiles * kRowsPerMTile; ++r)
        distance[r] = static_cast<float>(lane_distance - first_key + fragment_row(r) - fragment_row(0));
      s.visit([&](float& value, int r, int col) {
        value = __fmaf_rn(slope, ptx::abs(distance[r] - static_cast<float>(chunk * 16 + col)), value);
      });
    }
  };
};

template <class... Mods>
struct ScoreMods {
  // Whether softmax_scale enters with its sign.
  static constexpr bool kSigned = (Mods::kSigned || ...);

  template <int kMTiles, int kChunks>
  struct Of : Mods::template Of<kMTiles, kChunks>... {
    explicit Of(ScoreContext& context) : Mods::template Of<kMTiles, kChunks>(context)... {}

    void fetch(int first_key) { (Mods::template Of<kMTiles, kChunks>::fetch(first_key), ...); }

    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int first_key) const {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        (Mods::template Of<kMTiles, kChunks>::modify(s[chunk], chunk, first_key), ...);
    }
  };

  static float first_unit(const FwdParams& params) {
    return kSigned ? params.softmax_scale * kLog2E : params.scale_log2;
  }
};

}  // namespace fa2
