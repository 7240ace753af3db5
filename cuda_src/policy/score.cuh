// What happens to a score between Q K^T and the softmax: a list of modifiers, applied in order.
//
// Scores arrive as the plain products q . k, and the softmax multiplies what leaves by `unit` inside the exponent, so
// that without modifiers softmax_scale costs nothing. A modifier may change the unit.
//
// Modifier::Of<kMTiles, kChunks> is one warp's copy. It is made once per tile of rows. For each key tile, `fetch`
// starts loading what it needs, before Q K^T hides the latency; and `modify` changes the scores, chunk by chunk. Both
// get the warp's first key of the tile. What is only added to q . k may instead be where its sum starts (kStarts): the
// mma add it.
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
  static constexpr bool kSigned = false;  // whether softmax_scale has to come with its sign
  static constexpr bool kStarts = false;  // whether `start` sets the scores before Q K^T, in place of zeros
};

// Flips the sign. The softmax takes maxima before it scales, which is right for positive scales only: a negative
// softmax_scale is the positive one on flipped scores.
struct Negate : Modifier {
  template <int kMTiles, int kChunks>
  struct Of {
    explicit Of(ScoreContext&) {}
    void fetch(int) {}
    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int) const {
      visit_chunks(s, [](float& value, int, int) { value = -value; });
    }
  };
};

// s = softcap tanh(softmax_scale q . k / softcap). What leaves is the tanh; softcap is its unit.
struct Softcap : Modifier {
  static constexpr bool kSigned = true;
  template <int kMTiles, int kChunks>
  struct Of {
    float factor;
    void fetch(int) {}
    explicit Of(ScoreContext& context) : factor(context.params.softmax_scale * __frcp_rn(context.params.softcap)) {
      context.unit = context.params.softcap * kLog2E;
    }
    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int) const {
      visit_chunks(s, [&](float& value, int, int) { value = ptx::tanh(value * factor); });
    }
  };
};

// Brings scores to log2. What is added to scores is divided by their unit, which has to be positive and not extreme:
// where softmax_scale is not, this comes first (spec.py).
struct Scaled : Modifier {
  static constexpr bool kSigned = true;
  template <int kMTiles, int kChunks>
  struct Of {
    float factor;
    void fetch(int) {}
    explicit Of(ScoreContext& context) : factor(context.unit) { context.unit = 1.f; }
    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int) const {
      visit_chunks(s, [&](float& value, int, int) { value *= factor; });
    }
  };
};

// Adds -slope |i + diagonal - j|. kFirst: to nothing but q . k itself.
template <bool kFirst>
struct Alibi : Modifier {
  static constexpr bool kStarts = kFirst;
  template <int kMTiles, int kChunks>
  struct Of {
    float slope;        // negative, in the unit of the scores
    int lane_distance;  // i + diagonal - j of the lane's first row, and its column in a tile that begins at key 0

    explicit Of(ScoreContext& context)
        : lane_distance(context.first_row + fragment_row(0) + context.diagonal - fragment_col()) {
      const FwdParams& p = context.params;
      const float* slopes = reinterpret_cast<const float*>(p.alibi_slopes);
      slope = slopes[context.batch * p.alibi_stride_batch + context.head * p.alibi_stride_head] * -kLog2E *
              __frcp_rn(context.unit);
    }
    void fetch(int) {}

    void start(ScoreChunk<kMTiles> (&s)[kChunks], int first_key) const {
      visit(s, first_key, [&](float& value, float distance) { value = slope * distance; });
    }
    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int first_key) const {
      if constexpr (!kFirst) {
        visit(s, first_key, [&](float& value, float distance) { value = __fmaf_rn(slope, distance, value); });
      }
    }

   private:
    template <class Body>
    void visit(ScoreChunk<kMTiles> (&s)[kChunks], int first_key, Body&& body) const {
      float row_distance[kMTiles * kRowsPerMTile];
#pragma unroll
      for (int r = 0; r < kMTiles * kRowsPerMTile; ++r)
        row_distance[r] = static_cast<float>(lane_distance - first_key + fragment_row(r) - fragment_row(0));
      visit_chunks(
          s, [&](float& value, int r, int col) { body(value, ptx::abs(row_distance[r] - static_cast<float>(col))); });
    }
  };
};

template <class... Mods>
struct ScoreMods {
  static constexpr bool kSigned = (Mods::kSigned || ...);

  template <int kMTiles, int kChunks>
  struct Of : Mods::template Of<kMTiles, kChunks>... {
    explicit Of(ScoreContext& context) : Mods::template Of<kMTiles, kChunks>(context)... {}

    void fetch(int first_key) { (Mods::template Of<kMTiles, kChunks>::fetch(first_key), ...); }

    // What Q K^T is added to.
    void start(ScoreChunk<kMTiles> (&s)[kChunks], int first_key) const {
      if constexpr (!(Mods::kStarts || ...)) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) s[chunk].clear();
      }
      (start_with<Mods>(s, first_key), ...);
    }

    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int first_key) const {
      (Mods::template Of<kMTiles, kChunks>::modify(s, first_key), ...);
    }

   private:
    template <class Mod>
    void start_with(ScoreChunk<kMTiles> (&s)[kChunks], int first_key) const {
      if constexpr (Mod::kStarts) Mod::template Of<kMTiles, kChunks>::start(s, first_key);
    }
  };

  static float first_unit(const FwdParams& params) {
    return kSigned ? params.softmax_scale * kLog2E : params.scale_log2;
  }
};

}  // namespace fa2
