// Which keys a query row may see, and which rows see a key: both are ranges.
//
// Row i sees the keys [key_begin(i), key_end(i)); key j is seen by the rows [row_begin(j), row_end(j)). Neither end of
// either range ever falls from one row, or key, to the next. Hence a tile of rows needs the keys from its first row's
// begin to its last row's end, and no mask between its last row's begin and its first row's end; the same holds with
// rows and keys exchanged.
#pragma once

#include "core/tile.cuh"
#include "params.cuh"

namespace fa2 {

// ---- what is visible ------------------------------------------------------------------------------------------------

// Rows and keys are compared in 32 bits. Lengths are at most 10^9 (MAX_SEQLEN of params.py), so that row + shift fits
// for any shift within that; bounds beyond it hide nothing or everything, as the clamped ones do.
inline int clamped_shift(i64 shift) {
  constexpr i64 kLimit = 1000000000;
  return static_cast<int>(shift < -kLimit ? -kLimit : shift > kLimit ? kLimit : shift);
}

inline int clamped(int x, int limit) { return min(max(x, 0), limit); }

// Mask::Of<Lengths> answers for one batch element.

// Every key there is.
struct NoMask {
  template <class Lengths>
  struct Of {
    static constexpr bool kRight = false;  // whether the diagonal bounds a row's keys on the right
    static constexpr bool kLeft = false;   // and on the left
    const Lengths& lengths;

    Of(const AttentionParams&, const Lengths& lengths) : lengths(lengths) {}
    static int key_begin(int) { return 0; }
    int key_end(int) const { return lengths.seqlen_k(); }
    static int row_begin(int) { return 0; }
    int row_end(int) const { return lengths.seqlen_q(); }
  };
};

// Keys up to `window_right` beyond the diagonal (0 for plain causal).
struct CausalMask {
  template <class Lengths>
  struct Of {
    static constexpr bool kRight = true;
    static constexpr bool kLeft = false;
    const Lengths& lengths;
    int shift;  // key_end(i) = i + shift, before clamping

    Of(const AttentionParams& params, const Lengths& lengths)
        : lengths(lengths), shift(clamped_shift(lengths.diagonal() + params.window_right + 1)) {}
    static int key_begin(int) { return 0; }
    int key_end(int row) const { return clamped(row + shift, lengths.seqlen_k()); }
    int row_begin(int key) const { return clamped(key + 1 - shift, lengths.seqlen_q()); }
    int row_end(int) const { return lengths.seqlen_q(); }
  };
};

// And those from `window_left` before it.
struct WindowMask {
  template <class Lengths>
  struct Of : CausalMask::Of<Lengths> {
    static constexpr bool kLeft = true;
    int left_shift;  // key_begin(i) = i + left_shift, before clamping

    Of(const AttentionParams& params, const Lengths& lengths)
        : CausalMask::Of<Lengths>(params, lengths),
          left_shift(clamped_shift(lengths.diagonal() - params.window_left)) {}
    int key_begin(int row) const { return clamped(row + left_shift, this->lengths.seqlen_k()); }
    int row_end(int key) const { return clamped(key + 1 - left_shift, this->lengths.seqlen_q()); }
  };
};

// ---- which tiles that concerns --------------------------------------------------------------------------------------

// `count` rows, or keys, from `first` on.
struct Span {
  int first, count;
  // The last one of those that exist, of `seqlen` in all; before the first if none does.
  int last(int seqlen) const { return min(first + count, seqlen) - 1; }
};

// For a loop over keys: some row of a span sees something of the key tiles [begin, end), and the tiles
// [whole_begin, whole_end) are seen whole, by every row. Rows that do not exist are not asked: nothing of theirs is
// stored.
template <int kBlockN>
struct KeyTiles {
  int begin, end, whole_begin, whole_end;

  // Tiles are masked where not all of `asked` sees them whole: `rows`, or the part of them that one warp has.
  template <class Mask, class Lengths>
  static KeyTiles of(const Mask& mask, const Lengths& lengths, Span rows, Span asked) {
    const int last = rows.last(lengths.seqlen_q());
    const bool none = Lengths::kPadded && last < rows.first;
    return {mask.key_begin(rows.first) / kBlockN, none ? 0 : ceil_div(mask.key_end(last), kBlockN),
            ceil_div(mask.key_begin(asked.last(lengths.seqlen_q())), kBlockN), mask.key_end(asked.first) / kBlockN};
  }

  // Sets scores of key tile `n` that their row may not see to -inf. `first_row` and `first_key` are the warp's.
  template <int kMTiles, int kChunks, class Mask>
  void hide(ScoreChunk<kMTiles> (&s)[kChunks], const Mask& mask, int n, int first_row, int first_key) const {
    // Bounds are computed in the few tiles that are masked: registers for them would be missed in all the others.
    if (n >= whole_end) hide_right(s, mask, first_row, first_key);
    if (Mask::kLeft && n < whole_begin) hide_left(s, mask, first_row, first_key);
  }

  // What lies right of a row's range, and what lies left of it.
  template <int kMTiles, int kChunks, class Mask>
  static void hide_right(ScoreChunk<kMTiles> (&s)[kChunks], const Mask& mask, int first_row, int first_key) {
    int end[kMTiles * kRowsPerMTile];  // the first hidden column, counted from the lane's first
#pragma unroll
    for (int r = 0; r < kMTiles * kRowsPerMTile; ++r)
      end[r] = mask.key_end(first_row + fragment_row(r)) - first_key - fragment_col();
    visit_chunks(s, [&](float& value, int r, int col) {
      if (col >= end[r]) value = -kInfinity;
    });
  }
  template <int kMTiles, int kChunks, class Mask>
  static void hide_left(ScoreChunk<kMTiles> (&s)[kChunks], const Mask& mask, int first_row, int first_key) {
    int begin[kMTiles * kRowsPerMTile];
#pragma unroll
    for (int r = 0; r < kMTiles * kRowsPerMTile; ++r)
      begin[r] = mask.key_begin(first_row + fragment_row(r)) - first_key - fragment_col();
    visit_chunks(s, [&](float& value, int r, int col) {
      if (col < begin[r]) value = -kInfinity;
    });
  }
};

// For a loop over rows: row tiles [begin, end) see something of a span of keys, and the tiles [whole_begin, whole_end)
// see all of it with every row. Keys that do not exist are seen by nobody.
template <int kBlockM>
struct RowTiles {
  int begin, end, whole_begin, whole_end;

  template <class Mask, class Lengths>
  static RowTiles of(const Mask& mask, const Lengths& lengths, Span keys) {
    const int last = keys.last(lengths.seqlen_k());
    const bool none = last < keys.first;
    const bool all = last == keys.first + keys.count - 1;
    return {mask.row_begin(keys.first) / kBlockM, none ? 0 : ceil_div(mask.row_end(last), kBlockM),
            ceil_div(mask.row_begin(last), kBlockM), all ? mask.row_end(keys.first) / kBlockM : 0};
  }
};

}  // namespace fa2
