// Where keys and values lie in memory, and so how their tiles come into shared memory.
//
// A KV policy names the kernel's argument struct and a Stream. A stream
// keeps tiles of K and V coming, one ahead of the arithmetic, in this protocol, where each call is made by all threads:
//
//   start(n_block, left)      once, after Q's copies have been committed as a group of their own
//   acquire_k(n_block, left)  the K tile may be read: k_offset() is its place behind the first one
//   release_k(n_block, left)  this warp has read it
//   acquire_v()               the V tile may be read, at v_offset()
//   release_v()               this warp has read it
//
// `n_block` is the current tile, the next one is Tiles::kStep further, and `left` tiles are to be computed, this one
// included. Which copies start where is the stream's own business.
#pragma once

#include "core/copy_stream.cuh"
#include "params.cuh"

namespace fa2 {

// The rows of one head in an array with any strides. All offsets are 64-bit.
struct DenseRows {
  const char* base;
  i64 row_bytes;

  DenseRows(u64 pointer, i64 stride_batch, i64 stride_seq, i64 stride_head, int batch, int head)
      : base(reinterpret_cast<const char*>(pointer) + (batch * stride_batch + head * stride_head) * 2),
        row_bytes(stride_seq * 2) {}

  // Walks down the rows; one addition a step.
  struct Cursor {
    const char* at;
    i64 row_bytes;
    const char* pointer() const { return at; }
    void advance(int count) { at += count * row_bytes; }
  };
  Cursor cursor(int row) const { return {base + row * row_bytes, row_bytes}; }
};

inline DenseRows query_rows(const FwdParams& p, int batch, int head) {
  return DenseRows(p.q, p.q_stride_batch, p.q_stride_seq, p.q_stride_head, batch, head);
}

// Two arrays of any strides, copied by cp.async.
struct DenseKV {
  using Params = FwdParams;

  template <class Tiles>
  struct Stream : CopyStream<Tiles, DenseRows> {
    Stream(const FwdParams& p, const typename Tiles::Lengths& lengths, u32 shared, int batch, int head_k)
        : CopyStream<Tiles, DenseRows>(
              p, lengths, shared, DenseRows(p.k, p.k_stride_batch, p.k_stride_seq, p.k_stride_head, batch, head_k),
              DenseRows(p.v, p.v_stride_batch, p.v_stride_seq, p.v_stride_head, batch, head_k)) {}
  };
};

}  // namespace fa2
