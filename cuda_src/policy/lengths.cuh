// How many queries and keys a batch element has, and where its diagonal lies.
#pragma once

#include "core/types.cuh"
#include "params.cuh"

namespace fa2 {

// The diagonal of query i is key i + offset.
inline i64 given_diagonal(const FwdParams& params, int batch) {
  const int* offsets = reinterpret_cast<const int*>(params.diagonal_offsets);
  return offsets != nullptr ? offsets[batch] : params.diagonal_offset;
}

// As many as the arrays hold.
struct FullLengths {
  static constexpr bool kPadded = false;
  const FwdParams& params;
  int batch;

  FullLengths(const FwdParams& params, int batch) : params(params), batch(batch) {}
  int seqlen_q() const { return params.seqlen_q; }
  int seqlen_k() const { return params.seqlen_k; }
  i64 diagonal() const { return given_diagonal(params, batch); }
};

// As many as `seqlens_q` and `seqlens_k` say, where they are given. Numbers that no array could have are clamped: they
// may have come from another kernel a moment ago, so nobody has looked at them.
struct PaddedLengths {
  static constexpr bool kPadded = true;
  int q, k;
  i64 offset;

  PaddedLengths(const FwdParams& params, int batch)
      : q(length(params.seqlens_q, batch, params.seqlen_q)), k(length(params.seqlens_k, batch, params.seqlen_k)) {
    offset = given_diagonal(params, batch) + (params.diagonal_from_end != 0 ? k - q : 0);
  }
  int seqlen_q() const { return q; }
  int seqlen_k() const { return k; }
  i64 diagonal() const { return offset; }

 private:
  static int length(u64 lengths, int batch, int limit) {
    const int* values = reinterpret_cast<const int*>(lengths);
    return values != nullptr ? min(max(values[batch], 0), limit) : limit;
  }
};

}  // namespace fa2
