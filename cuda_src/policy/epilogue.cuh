// What becomes of a finished tile: normalised once, rounded, stored.
#pragma once

#include "core/softmax_state.cuh"
#include "params.cuh"

namespace fa2 {

// Turns four words per lane into four of one piece. Before, lane t of a quad holds word t of pieces 0..3; afterwards it
// holds words 0..3 of piece t. Two butterfly steps, each swapping what the partner needs.
inline void transpose_quad(u32 (&x)[4]) {
  const bool odd = lane_id() & 1;
  const bool high = lane_id() & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 received = ptx::shfl_xor<1>(odd ? x[i] : x[i + 1]);
    (odd ? x[i] : x[i + 1]) = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 received = ptx::shfl_xor<2>(high ? x[i] : x[i + 2]);
    (high ? x[i] : x[i + 2]) = received;
  }
}

// The first of those steps alone, for two pieces: afterwards lane t holds words t / 2 * 2 and t / 2 * 2 + 1 of
// piece t % 2.
inline void transpose_pair(u32 (&x)[2]) {
  const bool odd = lane_id() & 1;
  const u32 received = ptx::shfl_xor<1>(odd ? x[0] : x[1]);
  (odd ? x[0] : x[1]) = received;
}

// Where the results of one head go. Offsets and strides count elements.
struct Results {
  u64 out, lse;                    // addresses of the arrays; no lse: 0
  i64 out_offset, lse_offset;      // of the sequence's first row of this head
  i64 out_stride_seq, lse_stride;  // from row to row
  i64 out_stride_dim;

  // As the fields of a kernel's own argument struct have it.
  template <class Params, class Lengths>
  static Results of(const Params& p, const Lengths& lengths, int batch, int head) {
    return {p.out,
            p.lse,
            batch * p.out_stride_batch + head * p.out_stride_head + lengths.offset_q() * p.out_stride_seq,
            batch * p.lse_stride_batch + head * p.lse_stride_head + lengths.offset_q() * p.lse_stride_seq,
            p.out_stride_seq,
            p.lse_stride_seq,
            p.out_stride_dim};
  }
};

// `out` in the type Out (f16, bf16 or float), and `lse` where there is one. kVectors: rows of out start at 16-byte
// boundaries, their elements are adjacent, and head_dim_v is a multiple of 8. kSinks: every head has one score more,
// which weighs but has no value.
template <class Out, bool kVectors = true, bool kSinks = false>
struct WriteOut {
  static constexpr int kItemSize = kSame<Out, float> ? 4 : 2;
  // Whether `out` is fine enough to show that probabilities were rounded for the second product but not for their sum.
  static constexpr bool kSumRounded = kSame<Out, float>;

  // `first_row` is the warp's first row, `warp_col` the first of its columns of out; `rescale` is a factor of the
  // values, for dropout. Ends the state: its O becomes out.
  template <int kMTiles, int kCols, class Lengths>
  static void store(const AttentionParams& params, const Results& to, const Lengths& lengths, int head, int first_row,
                    int warp_col, SoftmaxState<kMTiles, kCols>& state, float rescale) {
    auto& o = state.o;
    char* const out =
        reinterpret_cast<char*>(to.out) + (to.out_offset + warp_col * (kVectors ? 1 : to.out_stride_dim)) * kItemSize;
    const int cols = static_cast<int>(params.head_dim_v) - warp_col;
    float* const lse = reinterpret_cast<float*>(to.lse) + to.lse_offset;
#pragma unroll
    for (int r = 0; r < kMTiles * kRowsPerMTile; ++r) {
      const int row = first_row + fragment_row(r);
      const bool stored = row < lengths.stored_q();
      const auto result = finished(params, state, r, head);
      const bool padding = Lengths::kPadded && row >= lengths.seqlen_q();
      const bool empty = padding || result.empty;
      const float factor = result.factor * rescale;
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& value = o.c[r / 2][n][r % 2 * 2 + i];
          value = empty ? 0.f : value * factor;  // exactly 0, also where 0 x NaN came from a masked value
        }
      if (stored && to.lse != 0 && lane_id() % 4 == 0 && warp_col == 0) {
        // A natural logarithm, as every consumer of `lse` wants it.
        ptx::store_global(lse + row * to.lse_stride, padding ? -kInfinity : result.log2_sum_of_exp2 * kLn2);
      }
      char* const out_row = out + row * (to.out_stride_seq * kItemSize);
      if constexpr (kVectors) {
        store_vectors(o, r, out_row, stored, cols);
      } else if (stored) {
        store_elements(o, r, out_row, cols, to.out_stride_dim);
      }
    }
  }

 private:
  template <class State>
  static typename State::Result finished(const AttentionParams& params, const State& state, int r, int head) {
    if constexpr (kSinks) {
      const float* sinks = reinterpret_cast<const float*>(params.sinks);
      // Towards zero, so that finite sinks stay finite.
      return state.result_with_sink(r, ptx::fma_towards_zero(sinks[head * params.sinks_stride], kLog2E, 0.f));
    } else {
      return state.result(r);
    }
  }

  // Whole 32-byte sectors per quad. Lanes of rows that are not stored still take part in the exchange.
  template <int kMTiles, int kCols>
  static void store_vectors(const OutFragment<kMTiles, kCols>& o, int r, char* out_row, bool stored, int cols) {
    const int quad_lane = lane_id() % 4;
    const auto& tiles = o.c[r / 2];
    const int half = r % 2 * 2;
    if constexpr (kSame<Out, float>) {
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
        const int col = n * 8 + fragment_col();
        if (stored && col < cols) ptx::store_global(out_row + col * 4, tiles[n][half], tiles[n][half + 1]);
      }
    } else {
#pragma unroll
      for (int n = 0; n + 4 <= kCols / 8; n += 4) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = ptx::pack<Out>(tiles[n + i][half], tiles[n + i][half + 1]);
        transpose_quad(x);
        const int col = (n + quad_lane) * 8;
        if (stored && col < cols) ptx::store_global(out_row + col * 2, x[0], x[1], x[2], x[3]);
      }
      if constexpr (kCols % 32 == 16) {
        constexpr int n = kCols / 32 * 4;
        u32 x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) x[i] = ptx::pack<Out>(tiles[n + i][half], tiles[n + i][half + 1]);
        transpose_pair(x);
        const int col = (n + quad_lane % 2) * 8 + quad_lane / 2 * 4;
        if (stored && col < cols) ptx::store_global(out_row + col * 2, x[0], x[1]);
      }
    }
  }

  // One element at a time, at any stride.
  template <int kMTiles, int kCols>
  static void store_elements(const OutFragment<kMTiles, kCols>& o, int r, char* out_row, int cols, i64 stride) {
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int col = n * 8 + fragment_col() + i;
        const float value = o.c[r / 2][n][r % 2 * 2 + i];
        if (col < cols) {
          if constexpr (kSame<Out, float>) {
            ptx::store_global(out_row + col * stride * 4, value);
          } else {
            ptx::store_global(out_row + col * stride * 2, static_cast<u16>(ptx::pack<Out>(value, 0.f)));
          }
        }
      }
  }
};

}  // namespace fa2
