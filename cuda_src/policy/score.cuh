// What happens to a score between Q K^T and the softmax: a list of modifiers, applied in order.
//
// Scores arrive as the plain products q . k, and the softmax multiplies what leaves by `unit` inside the exponent, so
// that without modifiers softmax_scale costs nothing. A modifier may change the unit.
//
// Modifier::Of<kMTiles, kChunks> is one warp's copy, made once for a head. For each tile of scores, `fetch` starts
// loading what it needs, before Q K^T hides the latency; and `modify` changes the scores, chunk by chunk. They get the
// tile's first row and key, of this warp: a loop may go over keys or over rows. What depends on the one that stays is
// computed once all the same, by the compiler, which moves it out of the loop. `fetch` needs help with that: its rows
// are told beforehand, by `rows`, which a loop over keys calls once and a loop over rows for each tile. (As an argument
// of `fetch`, in its branches, the rows' addresses were computed again for every key tile.)
//
// What is added to q . k itself, with no modifier before it, may instead be what the mma start from in place of zeros:
// such a modifier has kStarts, and sets the scores in `start`.
#pragma once

#include "core/tile.cuh"
#include "core/types.cuh"
#include "params.cuh"

namespace fa2 {

struct ScoreContext {
  const AttentionParams& params;
  int batch, head;
  int diagonal;  // of query i: key i + diagonal
  float unit;    // of the scores so far, to log2; changed by modifiers
};

struct Modifier {
  static constexpr bool kSigned = false;  // whether softmax_scale has to come with its sign
  static constexpr bool kStarts = false;  // whether Q K^T is added to what `start` sets, in place of zeros
};

// Flips the sign. The softmax takes maxima before it scales, which is right for positive scales only: a negative
// softmax_scale is the positive one on flipped scores.
struct Negate : Modifier {
  template <int kMTiles, int kChunks>
  struct Of {
    explicit Of(ScoreContext&) {}
    void rows(int) {}
    void fetch(int) {}
    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int, int) const {
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
    void rows(int) {}
    void fetch(int) {}
    explicit Of(ScoreContext& context) : factor(context.params.softmax_scale * __frcp_rn(context.params.softcap)) {
      context.unit = context.params.softcap * kLog2E;
    }
    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int, int) const {
      visit_chunks(s, [&](float& value, int, int) { value = ptx::tanh(value * factor); });
    }
  };
};

// Brings scores to log2. What is added to scores is divided by their unit, which has to be positive and not extreme:
// where softmax_scale is not, this comes first (score_modifiers of forward.py).
struct Scaled : Modifier {
  static constexpr bool kSigned = true;
  template <int kMTiles, int kChunks>
  struct Of {
    float factor;
    void rows(int) {}
    void fetch(int) {}
    explicit Of(ScoreContext& context) : factor(context.unit) { context.unit = 1.f; }
    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int, int) const {
      visit_chunks(s, [&](float& value, int, int) { value *= factor; });
    }
  };
};

// Adds -slope |i + diagonal - j|. kBeforeProduct: before Q K^T instead of after it, which saves an operation per score;
// possible where no modifier comes first.
template <bool kBeforeProduct>
struct Alibi : Modifier {
  static constexpr bool kStarts = kBeforeProduct;
  template <int kMTiles, int kChunks>
  struct Of {
    float slope;        // negative, in the unit of the scores
    int lane_distance;  // i + diagonal - j of the lane's first row and column, in a tile that begins at row 0 and key 0

    explicit Of(ScoreContext& context) : lane_distance(fragment_row(0) + context.diagonal - fragment_col()) {
      const AttentionParams& p = context.params;
      const float* slopes = reinterpret_cast<const float*>(p.alibi_slopes);
      slope = slopes[context.batch * p.alibi_stride_batch + context.head * p.alibi_stride_head] * -kLog2E *
              __frcp_rn(context.unit);
    }
    void rows(int) {}
    void fetch(int) {}

    void start(ScoreChunk<kMTiles> (&s)[kChunks], int first_row, int first_key) const {
      visit(s, first_row, first_key, [&](float& value, float distance) { value = slope * distance; });
    }
    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int first_row, int first_key) const {
      if constexpr (!kBeforeProduct) {
        visit(s, first_row, first_key,
              [&](float& value, float distance) { value = __fmaf_rn(slope, distance, value); });
      }
    }

   private:
    template <class Body>
    void visit(ScoreChunk<kMTiles> (&s)[kChunks], int first_row, int first_key, Body&& body) const {
      float row_distance[kMTiles * kRowsPerMTile];
#pragma unroll
      for (int r = 0; r < kMTiles * kRowsPerMTile; ++r)
        row_distance[r] = static_cast<float>(lane_distance + first_row - first_key + fragment_row(r) - fragment_row(0));
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

    void rows(int first_row) { (Mods::template Of<kMTiles, kChunks>::rows(first_row), ...); }

    void fetch(int first_key) { (Mods::template Of<kMTiles, kChunks>::fetch(first_key), ...); }

    // What Q K^T is added to.
    void start(ScoreChunk<kMTiles> (&s)[kChunks], int first_row, int first_key) const {
      if constexpr (!(Mods::kStarts || ...)) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) s[chunk].clear();
      }
      (start_with<Mods>(s, first_row, first_key), ...);
    }

    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int first_row, int first_key) const {
      (Mods::template Of<kMTiles, kChunks>::modify(s, first_row, first_key), ...);
    }

   private:
    template <class Mod>
    void start_with(ScoreChunk<kMTiles> (&s)[kChunks], int first_row, int first_key) const {
      if constexpr (Mod::kStarts) Mod::template Of<kMTiles, kChunks>::start(s, first_row, first_key);
    }
  };

  static float first_unit(const AttentionParams& params) {
    return kSigned ? params.softmax_scale * kLog2E : params.scale_log2;
  }
};

}  // namespace fa2
