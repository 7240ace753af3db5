// Where the rows of queries, keys and values lie in memory.
//
// A storage names two sources for one head of one sequence, between which the transport chooses: `Rows`, whose
// addresses threads compute, and `Boxes`, which the copy engine takes from an array that a tensor map describes. Both
// count rows from the sequence's first one.
#pragma once

#include "params.cuh"
#include "policy/lengths.cuh"

namespace fa2 {

// Rows at equal distances, in an array with any strides. All offsets are 64-bit.
struct DenseRows {
  const char* base;
  i64 row_bytes;
  // Rows and columns from here on do not exist. By reference, so that they are read where they are used: an operand of
  // the argument struct costs nothing there, a copy would take a register through the loop.
  const int& count;
  const int& cols;

  DenseRows(u64 pointer, i64 stride_batch, i64 stride_seq, i64 stride_head, int batch, int head, int offset,
            const int& count, const int& cols)
      : base(reinterpret_cast<const char*>(pointer) +
             (batch * stride_batch + head * stride_head + offset * stride_seq) * 2),
        row_bytes(stride_seq * 2),
        count(count),
        cols(cols) {}

  template <class Lengths>
  static DenseRows queries(const AttentionParams& p, const Lengths& lengths, int batch, int head) {
    return {p.q,  p.q_stride_batch,   p.q_stride_seq,     p.q_stride_head, batch,
            head, lengths.offset_q(), lengths.seqlen_q(), p.head_dim};
  }
  template <class Lengths>
  static DenseRows keys(const AttentionParams& p, const Lengths& lengths, int batch, int head) {
    return {p.k,  p.k_stride_batch,   p.k_stride_seq,     p.k_stride_head, batch,
            head, lengths.offset_k(), lengths.seqlen_k(), p.head_dim};
  }
  template <class Lengths>
  static DenseRows values(const AttentionParams& p, const Lengths& lengths, int batch, int head) {
    return {p.v,  p.v_stride_batch,   p.v_stride_seq,     p.v_stride_head, batch,
            head, lengths.offset_k(), lengths.seqlen_k(), p.head_dim_v};
  }

  // Walks down the rows; one addition a step.
  struct Cursor {
    const char* at;
    i64 row_bytes;
    const char* pointer() const { return at; }
    void advance(int count) { at += count * row_bytes; }
  };
  Cursor cursor(int row) const { return {base + row * row_bytes, row_bytes}; }
};

// The same through a tensor map over (head_dim, seqlen, heads, batch), innermost first, with boxes of 64 columns and a
// tile's rows. A map knows the array's end only, not that of each batch element: hence full lengths. Maps are fields of
// the kernel's own argument struct, whichever that is.
struct DenseBoxes {
  const TensorMap* map;
  int batch, head;

  template <class Params>
  static DenseBoxes keys(const Params& p, const FullLengths&, int batch, int head) {
    return {&p.k_map, batch, head};
  }
  template <class Params>
  static DenseBoxes values(const Params& p, const FullLengths&, int batch, int head) {
    return {&p.v_map, batch, head};
  }

  // One thread asks for the box at (row, col); `barrier` counts its bytes.
  void copy(u32 shared, int row, int col, u32 barrier) const {
    ptx::copy_tensor_4d(shared, map, col, row, head, batch, barrier);
  }
};

// Arrays in which a head's rows follow each other.
struct DenseStorage {
  using Rows = DenseRows;
  using Boxes = DenseBoxes;
};

}  // namespace fa2
