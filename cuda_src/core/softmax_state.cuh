// What attention over some of the keys leaves of a warp's rows: (O, m, l). Two of them, over different keys of the same
// rows, merge to what attention over all of those keys would have left, to rounding. So keys can be split over blocks,
// or come piece by piece.
//
// Any attention result is such a state too: O is `out`, m is `lse`, l is 1 (0 where lse is -inf), and `scale` log2 e.
#pragma once

#include "core/tile.cuh"

namespace fa2 {

template <int kMTiles, int kCols>
struct SoftmaxState {
  static constexpr int kRows = kMTiles * kRowsPerMTile;

  OutFragment<kMTiles, kCols> o;  // O = sum_j 2^((s_j - m) scale) v_j
  float reference[kRows];         // m, as large as the row's scores or nearly; -inf where none was seen
  float log2_reference[kRows];    // m scale, and the lowest finite number where none was seen
  float sum[kRows];               // l = sum_j 2^((s_j - m) scale)
  // What O is divided by: l, or the same sum of rounded probabilities where O was summed of those. O over this one is a
  // true mean of values, to float32's precision; `lse` wants the other.
  float weight[kRows];
  float scale;  // of a score, to log2; positive

  // What is left to know of a row.
  struct Result {
    bool empty;              // nothing was seen. Told by the sum and not by the reference: a row of NaN scores raises
                             // no maximum, and must stay NaN
    float factor;            // of O
    float log2_sum_of_exp2;  // of the scaled scores
  };

  Result result(int r) const {
    const bool empty = sum[r] == 0.f;
    return {empty, __frcp_rn(weight[r]), empty ? -kInfinity : log2_reference[r] + ptx::log2(sum[r])};
  }

  // With one score more, which has no value: `sink`, in log2.
  Result result_with_sink(int r, float sink) const {
    const bool empty = sum[r] == 0.f;
    const float top = ptx::max(log2_reference[r], sink);
    const float factor = ptx::exp2(log2_reference[r] - top);
    const float sink_weight = ptx::exp2(sink - top);
    return {empty, factor * __frcp_rn(weight[r] * factor + sink_weight),
            top + ptx::log2(sum[r] * factor + sink_weight)};
  }

  // Takes in the state of the same rows over other keys, of the same scale.
  void merge(const SoftmaxState& other) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float top = ptx::max(reference[r], other.reference[r]);
      const float own = factor_to(r, top);
      const float others = other.factor_to(r, top);
      reference[r] = top;
      log2_reference[r] = ptx::max(top * scale, kLowest);
      sum[r] = sum[r] * own + other.sum[r] * others;
      weight[r] = weight[r] * own + other.weight[r] * others;
      o.add_row(r, own, other.o, others);
    }
  }

 private:
  // What sums to the reference m have to be multiplied by for the reference `top`, which is not below m. In differences
  // of scores, which stay exact where their multiples do not; and 0 where nothing was summed.
  float factor_to(int r, float top) const {
    if (sum[r] == 0.f) return 0.f;
    return reference[r] == top ? 1.f : ptx::exp2((reference[r] - top) * scale);
  }
};

}  // namespace fa2
