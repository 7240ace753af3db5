// Which keys a query row may see, as a range: [row_begin(row), row_end(row)). Neither bound ever falls from one row to
// the next, so a tile of rows needs the keys from its first row's begin to its last row's end, and no mask between its
// last row's begin and its first row's end.
#pragma once

#include "core/types.cuh"
#include "params.cuh"

namespace fa2 {

// Key numbers that are compared with rows in 32 bits. Lengths are at most 10^9 (problem.py), so that row + shift fits
// for any shift within that; bounds beyond it hide nothing or everything, as the clamped ones do.
inline int clamped_shift(i64 shift) {
  constexpr i64 kLimit = 1000000000;
  return static_cast<int>(shift < -kLimit ? -kLimit : shift > kLimit ? kLimit : shift);
}

// Every key there is.
template <class Lengths>
struct NoMask {
  static constexpr bool kRight = false;
  static constexpr bool kLeft = false;
  const Lengths& lengths;

  NoMask(const FwdParams&, const Lengths& lengths) : lengths(lengths) {}
  int row_begin(int) const { return 0; }
  int row_end(int) const { return lengths.seqlen_k(); }
};

// Keys up to `window_right` beyond the diagonal (0 for plain causal).
template <class Lengths>
struct CausalMask {
  static constexpr bool kRight = true;
  static constexpr bool kLeft = false;
  const Lengths& lengths;
  int shift;  // row_end(i) = i + shift, before clamping

  CausalMask(const FwdParams& params, const Lengths& lengths)
      : lengths(lengths), shift(clamped_shift(lengths.diagonal() + params.window_right + 1)) {}
  int row_begin(int) const { return 0; }
  int row_end(int row) const { return min(max(row + shift, 0), lengths.seqlen_k()); }
};

// And those from `window_left` before it.
template <class Lengths>
struct WindowMask : CausalMask<Lengths> {
  static constexpr bool kLeft = true;
  int left_shift;

  WindowMask(const FwdParams& params, const Lengths& lengths)
      : CausalMask<Lengths>(params, lengths), left_shift(clamped_shift(lengths.diagonal() - params.window_left)) {}
  int row_begin(int row) const { return min(max(row + left_shift, 0), this->lengths.seqlen_k()); }
};

}  // namespace fa2
