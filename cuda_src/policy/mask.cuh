// Which keys a query row may see, as a range: [0, row_end(row)). row_end never falls from one row to the next, so a
// tile of rows needs the keys up to its last row's end, and needs no mask up to its first row's.
#pragma once

#include "core/types.cuh"
#include "params.cuh"

namespace fa2 {

// Every key there is.
struct NoMask {
  static constexpr bool kCausal = false;
  int seqlen_k;

  NoMask(const FwdParams& params, int) : seqlen_k(params.seqlen_k) {}
  int row_end(int) const { return seqlen_k; }
};

// Keys up to the diagonal, which for query i is key i + offset, and `window_right` beyond it (0 for plain causal).
struct CausalMask {
  static constexpr bool kCausal = true;
  int seqlen_k;
  int shift;  // row_end(i) = i + shift, before clamping

  // Lengths are at most 10^9 (problem.py), so that row + shift fits in 32 bits for any shift in [-10^9, 10^9]. Offsets
  // beyond that see nothing or everything, as the clamped ones do.
  CausalMask(const FwdParams& params, int batch) : seqlen_k(params.seqlen_k) {
    const int* offsets = reinterpret_cast<const int*>(params.diagonal_offsets);
    const i64 offset = offsets != nullptr ? offsets[batch] : params.diagonal_offset;
    const i64 end = offset + params.window_right + 1;
    constexpr i64 kLimit = 1000000000;
    shift = static_cast<int>(end < -kLimit ? -kLimit : end > kLimit ? kLimit : end);
  }
  int row_end(int row) const { return min(max(row + shift, 0), seqlen_k); }
};

}  // namespace fa2
