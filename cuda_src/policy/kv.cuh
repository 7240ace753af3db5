// Where keys and values lie in memory.
#pragma once

#include "core/types.cuh"
#include "params.cuh"

namespace fa2 {

// One array with any strides: row `key` of a head is at base + key * stride. All offsets are 64-bit.
struct DenseKV {
  struct Rows {
    const char* base;
    i64 row_bytes;

    // Walks down the rows; one addition a step.
    struct Cursor {
      const char* at;
      i64 row_bytes;
      const char* pointer() const { return at; }
      void advance(int count) { at += count * row_bytes; }
    };
    Cursor cursor(int row) const { return {base + row * row_bytes, row_bytes}; }
    Rows from(int first) const { return {base + first * row_bytes, row_bytes}; }
  };

  static Rows keys(const FwdParams& params, int batch, int head_k) {
    return rows(params.k, params.k_stride_batch, params.k_stride_seq, params.k_stride_head, batch, head_k);
  }
  static Rows values(const FwdParams& params, int batch, int head_k) {
    return rows(params.v, params.v_stride_batch, params.v_stride_seq, params.v_stride_head, batch, head_k);
  }
  // Queries are stored the same way.
  static Rows queries(const FwdParams& params, int batch, int head) {
    return rows(params.q, params.q_stride_batch, params.q_stride_seq, params.q_stride_head, batch, head);
  }

 private:
  static Rows rows(u64 pointer, i64 stride_batch, i64 stride_seq, i64 stride_head, int batch, int head) {
    const i64 offset = batch * stride_batch + head * stride_head;
    return {reinterpret_cast<const char*>(pointer) + offset * 2, stride_seq * 2};
  }
};

}  // namespace fa2
