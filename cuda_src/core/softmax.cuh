// The online softmax of one warp's rows, in base 2. Where a pair of warps shares the rows, each with half of the keys
// (team.cuh), both keep the same references, and each sums its own keys until the end.
//
// A row keeps a reference m and the sum l = sum_j 2^((s_j - m) scale) over the keys seen, with O = sum_j 2^((s_j - m)
// scale) v_j beside it; `scale` is softmax_scale * log2 e, positive. Textbook m is the running maximum. Here it follows
// the maximum only when that has grown by more than `kSlack` (in log2): until then probabilities may reach 2^kSlack,
// which float32 sums and 16-bit probabilities hold without loss, and the pass over O is saved. Each row decides for
// itself, or its result would depend on its neighbours in the tile; the warp vote only skips code that would change
// nothing. kSlack = 0 is the textbook.
//
// The exponent is one fused multiply-add, s scale - shift with shift = m scale. Rounding the shift moves all exponents
// of a row by half a unit in its last place at most, which cancels when O is divided by l. Beyond 2^24 that unit is
// more than 1, and probabilities would overflow: such rows, called large, subtract m from their scores first and shift
// by nothing.
#pragma once

#include "core/softmax_state.cuh"

namespace fa2 {

template <class T, int kMTiles, int kSlack, bool kSumRounded>
struct OnlineSoftmax {
  static constexpr int kRows = kMTiles * kRowsPerMTile;
  // The reference m of each row, and m scale. Of a row that has seen nothing the latter is the lowest finite number and
  // not -inf, so that its hidden scores get 2^(-inf - shift) = 0 without a special case; any score still raises it.
  float reference[kRows];
  float shift[kRows];
  float row_sum[kRows];  // this lane's share: a row's columns are spread over the four lanes of a quad
  // The same of the probabilities as the second product sees them, rounded to T: the state's weight. Kept only where
  // the output is float32 and would show it.
  float rounded_sum[kRows];
  float scale;

  explicit OnlineSoftmax(float scale) : scale(scale) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      reference[r] = -kInfinity;
      shift[r] = scaled(reference[r]);
      row_sum[r] = rounded_sum[r] = 0.f;
    }
  }

  // Raises the references for a new block of scores and rescales what was summed so far.
  template <int kChunks, int kCols, class Team>
  void raise(ScoreChunk<kMTiles> (&s)[kChunks], OutFragment<kMTiles, kCols>& o, const Team& team) {
    float block_max[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) block_max[r] = -kInfinity;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      s[chunk].visit([&](float& value, int r, int) { block_max[r] = ptx::max(block_max[r], value); });

    // A row's maximum is spread over the lanes of its quad, but whether any row has grown shows without bringing it
    // together. A large row has more to do in any case.
    bool any_special = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) any_special |= block_max[r] * scale > shift[r] + kSlack || shift[r] == kLargeShift;
    if (team.any(any_special)) raise_rows(block_max, s, o, team);
  }

  // Scores to probabilities, in place, adding them to the row sums.
  void exponentiate(ScoreChunk<kMTiles>& s) {
    s.visit([&](float& value, int r, int) {
      value = ptx::exp2(__fmaf_rn(value, scale, -shift[r]));
      row_sum[r] += value;
      if constexpr (kSumRounded) {
        value = ptx::rounded<T>(value);
        rounded_sum[r] += value;
      }
    });
  }

  // Completes the row sums over the quad and the team. What has become of the rows, with `o` as it was summed so far:
  template <int kCols, class Team>
  SoftmaxState<kMTiles, kCols> finish(const OutFragment<kMTiles, kCols>& o, const Team& team) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] = sum_quad(row_sum[r]);
      if constexpr (kSumRounded) rounded_sum[r] = sum_quad(rounded_sum[r]);
    }
    const auto add = [](float a, float b) { return a + b; };
    team.combine(row_sum, add);
    if constexpr (kSumRounded) team.combine(rounded_sum, add);

    SoftmaxState<kMTiles, kCols> state;
    state.o = o;
    state.scale = scale;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      state.reference[r] = reference[r];
      state.log2_reference[r] = is_large(r) ? scaled(reference[r]) : shift[r];
      state.sum[r] = row_sum[r];
      state.weight[r] = kSumRounded ? rounded_sum[r] : row_sum[r];
    }
    return state;
  }

 private:
  static constexpr float kLarge = 16777216.f;               // 2^24
  static constexpr float kLargeShift = 1.17549435082e-38f;  // the smallest normal number: as good as 0, and a mark

  // Never below the lowest finite number, or hidden scores would meet -inf - -inf.
  float scaled(float score) const { return ptx::max(score * scale, kLowest); }
  bool is_large(int r) const {
    const float s = scaled(reference[r]);
    return (s >= kLarge || s <= -kLarge) && reference[r] != -kInfinity;
  }

  static float sum_quad(float x) {
    x += ptx::shfl_xor<1>(x);
    return x + ptx::shfl_xor<2>(x);
  }

  template <int kChunks, int kCols, class Team>
  void raise_rows(float (&block_max)[kRows], ScoreChunk<kMTiles> (&s)[kChunks], OutFragment<kMTiles, kCols>& o,
                  const Team& team) {
    float factor[kRows];
    team.combine(block_max, [](float a, float b) { return ptx::max(a, b); });
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      block_max[r] = ptx::max(block_max[r], ptx::shfl_xor<1>(block_max[r]));
      block_max[r] = ptx::max(block_max[r], ptx::shfl_xor<2>(block_max[r]));
      const bool was_large = is_large(r);
      const float old_reference = reference[r];
      const float old_shift = was_large ? scaled(old_reference) : shift[r];
      // In differences of scores, which stay exact where their multiples do not.
      const bool grew =
          was_large ? (block_max[r] - old_reference) * scale > kSlack : block_max[r] * scale > old_shift + kSlack;
      if (grew) reference[r] = block_max[r];
      const bool large = is_large(r);
      const float new_shift = scaled(reference[r]);
      // Exactly 1 where nothing grew, 0 on a row's first key.
      factor[r] =
          !grew ? 1.f : ptx::exp2(was_large || large ? (old_reference - reference[r]) * scale : old_shift - new_shift);
      shift[r] = large ? kLargeShift : new_shift;
      row_sum[r] *= factor[r];
      if constexpr (kSumRounded) rounded_sum[r] *= factor[r];
    }
    o.scale_rows(factor);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      s[chunk].visit([&](float& value, int r, int) {
        if (is_large(r)) value -= reference[r];
      });
  }
};

}  // namespace fa2
