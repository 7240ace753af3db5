// Score modifiers that read a score array, one of the scores' shape, (batch, heads, seqlen_q, seqlen_k): an additive
// bias and a boolean mask. Both are read in place, each lane the elements that meet its own scores; an axis that is
// broadcast has a stride of zero.
//
// kRows: values differ from row to row; without it, one row serves all. kPairs: the elements of a lane's two adjacent
// columns are one aligned load, for which they have to be neighbours at an aligned address in every row
// (check_scores_like of options.py).
#pragma once

#include "policy/score.cuh"

namespace fa2 {

// Loads two elements, of adjacent columns, and keeps them as they lie in memory. `low` and `high` give their values,
// the first column's and the second's.
template <class T>
struct Element;

template <>
struct Element<float> {
  using Pair = ptx::FloatPair;
  static Pair load_pair(const char* at) { return ptx::load_global_pair(at); }
  static Pair load_two(const char* first, const char* second) {
    return {ptx::load_global_f32(first), ptx::load_global_f32(second)};
  }
  static float low(const Pair& pair) { return pair.low; }
  static float high(const Pair& pair) { return pair.high; }
};

template <class T>
struct HalfElement {
  using Pair = u32;
  static Pair load_pair(const char* at) { return ptx::load_global_b32(at); }
  static Pair load_two(const char* first, const char* second) {
    return ptx::load_global_b16(first) | ptx::load_global_b16(second) << 16;
  }
  static float low(Pair pair) { return ptx::unpack_low<T>(pair); }
  static float high(Pair pair) { return ptx::unpack_high<T>(pair); }
};
template <>
struct Element<f16> : HalfElement<f16> {};
template <>
struct Element<bf16> : HalfElement<bf16> {};

template <>
struct Element<bool> {
  using Pair = u32;
  static Pair load_pair(const char* at) { return ptx::load_global_b16(at); }
  static Pair load_two(const char* first, const char* second) {
    return ptx::load_global_b8(first) | ptx::load_global_b8(second) << 8;
  }
  static bool low(Pair pair) { return (pair & 0xff) != 0; }
  static bool high(Pair pair) { return (pair & 0xff00) != 0; }
};

// A lane's elements of one key tile, in pairs of adjacent columns.
template <class T, bool kRows, bool kPairs, int kMTiles, int kChunks>
struct ScoreArrayFragment {
  using E = Element<T>;
  static constexpr int kItemSize = kSame<T, float> ? 4 : kSame<T, bool> ? 1 : 2;
  static constexpr int kDistinctRows = kRows ? kMTiles * kRowsPerMTile : 1;

  const char* head;  // the first element of this head
  i64 row_bytes, key_bytes;
  int first_row, last_row, last_key;
  typename E::Pair pairs[kChunks * 2][kDistinctRows];

  ScoreArrayFragment(const ScoreContext& context, u64 pointer, i64 stride_batch, i64 stride_head, i64 stride_seq,
                     i64 stride_key)
      : head(reinterpret_cast<const char*>(pointer) +
             (context.batch * stride_batch + context.head * stride_head) * kItemSize),
        row_bytes(stride_seq * kItemSize),
        key_bytes(stride_key * kItemSize),
        last_row(context.params.seqlen_q - 1),
        last_key(context.params.seqlen_k - 1) {}

  void rows(int first) { first_row = first; }

  // Rows and columns past the end are read as the last one, which exists. The columns are hidden by the mask
  // afterwards, the rows never stored.
  void fetch(int first_key) {
    const bool inside = first_key + kChunks * 16 <= last_key + 1;
#pragma unroll
    for (int r = 0; r < kDistinctRows; ++r) {
      const char* row = head + (kRows ? min(first_row + fragment_row(r), last_row) * row_bytes : 0);
      const int key = first_key + fragment_col();
      if (kPairs && inside) {
        const char* at = row + static_cast<i64>(key) * kItemSize;
#pragma unroll
        for (int n = 0; n < kChunks * 2; ++n) pairs[n][r] = E::load_pair(at + n * 8 * kItemSize);
      } else {
#pragma unroll
        for (int n = 0; n < kChunks * 2; ++n) {
          const int first = min(key + n * 8, last_key);
          const int second = min(key + n * 8 + 1, last_key);
          pairs[n][r] = E::load_two(row + first * key_bytes, row + second * key_bytes);
        }
      }
    }
  }

  // body(value, element) for every score.
  template <class Body>
  void visit(ScoreChunk<kMTiles> (&s)[kChunks], Body&& body) const {
    visit_chunks(s, [&](float& value, int r, int col) {
      const auto& pair = pairs[col / 8][kRows ? r : 0];
      body(value, col % 2 == 0 ? E::low(pair) : E::high(pair));
    });
  }
};

template <class T, bool kRows, bool kPairs>
struct Bias : Modifier {
  template <int kMTiles, int kChunks>
  struct Of {
    float factor;  // to the unit of the scores
    ScoreArrayFragment<T, kRows, kPairs, kMTiles, kChunks> bias;
    explicit Of(ScoreContext& context)
        : factor(kLog2E * __frcp_rn(context.unit)),
          bias(context, context.params.bias, context.params.bias_stride_batch, context.params.bias_stride_head,
               context.params.bias_stride_seq, context.params.bias_stride_key) {}
    void rows(int first_row) { bias.rows(first_row); }
    void fetch(int first_key) { bias.fetch(first_key); }
    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int, int) const {
      // Towards zero, so that the lowest finite number, which is in use as a mask, stays finite: a row of nothing else
      // has a mean, as in the definition.
      bias.visit(s, [&](float& value, float added) { value = ptx::fma_towards_zero(added, factor, value); });
    }
  };
};

template <bool kRows, bool kPairs>
struct BoolMask : Modifier {
  template <int kMTiles, int kChunks>
  struct Of {
    ScoreArrayFragment<bool, kRows, kPairs, kMTiles, kChunks> mask;
    explicit Of(ScoreContext& context)
        : mask(context, context.params.mask, context.params.mask_stride_batch, context.params.mask_stride_head,
               context.params.mask_stride_seq, context.params.mask_stride_key) {}
    void rows(int first_row) { mask.rows(first_row); }
    void fetch(int first_key) { mask.fetch(first_key); }
    void modify(ScoreChunk<kMTiles> (&s)[kChunks], int, int) const {
      mask.visit(s, [](float& value, bool visible) { value = visible ? value : -kInfinity; });
    }
  };
};

}  // namespace fa2
