// The online softmax of one warp's rows, in base 2.
//
// A row keeps a reference m and the sum l = sum_j 2^(s_j - m) over the keys seen, with O = sum_j 2^(s_j - m) v_j beside
// it; s are the scores times `scale` (softmax_scale * log2 e), which is folded into the exponent's fused multiply-add.
// Textbook m is the running maximum. Here it follows the maximum only when that has grown by more than `kSlack` (in
// log2): until then probabilities may reach 2^kSlack, which float32 sums and 16-bit probabilities hold without loss,
// and the pass over O is saved. Each row decides for itself, or its result would depend on its neighbours in the tile;
// the warp vote only skips code that would multiply by 1. kSlack = 0 is the textbook.
#pragma once

#include "core/tile.cuh"

namespace fa2 {

template <int kMTiles, int kSlack>
struct OnlineSoftmax {
  static constexpr int kRows = kMTiles * kRowsPerMTile;
  // The reference m of each row. It starts at the lowest finite number and not at -inf, so that a row that has seen
  // nothing gets 2^(-inf - m) = 0 for its hidden scores without a special case; any finite score still raises it.
  float reference[kRows];
  float row_sum[kRows];  // this lane's share: a row's columns are spread over the four lanes of a quad
  float scale;

  explicit OnlineSoftmax(float scale) : scale(scale) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      reference[r] = kLowest;
      row_sum[r] = 0.f;
    }
  }

  // Raises the references for a new block of scores and rescales what was summed so far.
  template <int kChunks, int kCols>
  void raise(ScoreChunk<kMTiles> (&s)[kChunks], OutFragment<kMTiles, kCols>& o) {
    float block_max[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) block_max[r] = -kInfinity;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      s[chunk].visit([&](float& value, int r, int) { block_max[r] = ptx::max(block_max[r], value); });

    // A row's maximum is spread over the lanes of its quad, but whether any row has grown shows without bringing it
    // together.
    bool any_grew = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      block_max[r] *= scale;
      any_grew |= grew(r, block_max[r]);
    }
    if (ptx::any(any_grew)) {
      float factor[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        block_max[r] = ptx::max(block_max[r], ptx::shfl_xor<1>(block_max[r]));
        block_max[r] = ptx::max(block_max[r], ptx::shfl_xor<2>(block_max[r]));
        const float raised = grew(r, block_max[r]) ? block_max[r] : reference[r];
        factor[r] = ptx::exp2(reference[r] - raised);  // exactly 1 where nothing grew, 0 on a row's first key
        reference[r] = raised;
        row_sum[r] *= factor[r];
      }
      o.scale_rows(factor);
    }
  }

  // Scores to probabilities, in place, adding them to the row sums.
  void exponentiate(ScoreChunk<kMTiles>& s) {
    s.visit([&](float& value, int r, int) {
      value = ptx::exp2(__fmaf_rn(value, scale, -reference[r]));
      row_sum[r] += value;
    });
  }

  // Completes the row sums over the quad.
  void finish() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] += ptx::shfl_xor<1>(row_sum[r]);
      row_sum[r] += ptx::shfl_xor<2>(row_sum[r]);
    }
  }

  // Tested by the sum and not by the reference: a row of NaN scores raises no maximum, and must stay NaN.
  bool is_empty(int r) const { return row_sum[r] == 0.f; }
  float inverse_sum(int r) const { return __frcp_rn(row_sum[r]); }
  // log sum_j e^(scores): natural, as every consumer of `lse` wants it.
  float log_sum_exp(int r) const { return is_empty(r) ? -kInfinity : (reference[r] + ptx::log2(row_sum[r])) * kLn2; }

 private:
  bool grew(int r, float block_max) const { return block_max > reference[r] + kSlack; }
};

}  // namespace fa2
