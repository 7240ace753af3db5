// How many queries and keys a batch element has, where they begin, and where its diagonal lies.
//
// Kernels and policies count rows and keys from the sequence's own first ones. Only what makes addresses asks where
// those lie: row i is row offset_q() + i of the batch element's array, key j row offset_k() + j. Rows of the result
// belong to the sequence up to stored_q(): those from seqlen_q() on are padding, which is written too, and what lies
// beyond is not ours, though a tile may reach there.
#pragma once

#include "core/types.cuh"
#include "params.cuh"

namespace fa2 {

// The diagonal of query i is key i + offset.
inline i64 given_diagonal(const AttentionParams& params, int batch) {
  const int* offsets = reinterpret_cast<const int*>(params.diagonal_offsets);
  return offsets != nullptr ? offsets[batch] : params.diagonal_offset;
}

// As many as the arrays hold.
struct FullLengths {
  static constexpr bool kPadded = false;  // whether a tile may lie beyond the last query
  const AttentionParams& params;
  int batch;

  FullLengths(const AttentionParams& params, int batch) : params(params), batch(batch) {}
  const int& seqlen_q() const { return params.seqlen_q; }
  const int& seqlen_k() const { return params.seqlen_k; }
  i64 diagonal() const { return given_diagonal(params, batch); }

  static constexpr int offset_q() { return 0; }
  static constexpr int offset_k() { return 0; }
  int stored_q() const { return params.seqlen_q; }
};

// As many as `seqlens_q` and `seqlens_k` say, where they are given. Numbers that no array could have are clamped: they
// may have come from another kernel a moment ago, so nobody has looked at them.
struct PaddedLengths {
  static constexpr bool kPadded = true;
  const AttentionParams& params;
  int q, k;
  i64 offset;

  PaddedLengths(const AttentionParams& params, int batch)
      : params(params),
        q(length(params.seqlens_q, batch, params.seqlen_q)),
        k(length(params.seqlens_k, batch, params.seqlen_k)) {
    offset = given_diagonal(params, batch) + (params.diagonal_from_end != 0 ? k - q : 0);
  }
  const int& seqlen_q() const { return q; }
  const int& seqlen_k() const { return k; }
  i64 diagonal() const { return offset; }

  static constexpr int offset_q() { return 0; }
  static constexpr int offset_k() { return 0; }
  int stored_q() const { return params.seqlen_q; }

 private:
  static int length(u64 lengths, int batch, int limit) {
    const int* values = reinterpret_cast<const int*>(lengths);
    return values != nullptr ? min(max(values[batch], 0), limit) : limit;
  }
};

}  // namespace fa2
