// The two matrix products of attention, for the rows of one warp, from shared memory through ldmatrix to mma.sync.
#pragma once

#include "core/tile.cuh"

namespace fa2 {

// Which chunk of a 16 x 16 piece a lane addresses for ldmatrix.x4, so that the four matrices arrive in operand order.
//
// Rows of A (Q), and of B stored with the reduction along rows (V, read transposed): the left column of matrices first.
template <class Tile>
inline LaneAddress<Tile> row_operand(u32 tile, int first_row) {
  const int lane = lane_id();
  return LaneAddress<Tile>(tile, first_row + lane % 16, lane / 16);
}
// B stored with the reduction along columns (K): the upper row of matrices first.
template <class Tile>
inline LaneAddress<Tile> col_operand(u32 tile, int first_row) {
  const int lane = lane_id();
  return LaneAddress<Tile>(tile, first_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// Q as the A operand of one warp. Its first kKept columns are read once and kept in registers, kMTiles x kKept / 4 of
// them; the others are read from shared memory whenever they are used.
template <int kKept, class QTile, int kMTiles>
struct QOperand {
  LaneAddress<QTile> address;
  u32 kept[max(kKept / 16, 1)][kMTiles][4];
  QOperand(u32 tile, int first_row) : address(row_operand<QTile>(tile, first_row)) {
#pragma unroll
    for (int d = 0; d < kKept; d += 16)
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) ptx::ldmatrix_x4(kept[d / 16][m], address.at(m * 16, d));
  }

  // The 16 x 16 block of m at column d.
  void load(u32 (&a)[4], int m, int d) const {
    if (d < kKept) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = kept[d / 16][m][i];
    } else {
      ptx::ldmatrix_x4(a, address.at(m * 16, d));
    }
  }
};

// s += Q K^T. The reduction runs outermost, so that each piece of Q is read once per key tile.
template <class T, int kKept, int kMTiles, int kChunks, class QTile, class KTile>
inline void gemm_qk(ScoreChunk<kMTiles> (&s)[kChunks], const QOperand<kKept, QTile, kMTiles>& q,
                    const LaneAddress<KTile>& k) {
#pragma unroll
  for (int d = 0; d < QTile::kNumCols; d += 16) {
    u32 a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) q.load(a[m], m, d);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      u32 b[4];
      ptx::ldmatrix_x4(b, k.at(chunk * 16, d));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ptx::mma_m16n8k16<T>(s[chunk].c[m][0], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<T>(s[chunk].c[m][1], a[m], b[2], b[3]);
      }
    }
  }
}

// o += P V for the sixteen keys of one chunk of P, given as A operands; `first_key` is the chunk's first row in the
// tile.
template <class T, int kMTiles, int kCols, class VTile>
inline void gemm_pv(OutFragment<kMTiles, kCols>& o, const u32 (&a)[kMTiles][4], const LaneAddress<VTile>& v,
                    int first_key) {
#pragma unroll
  for (int d = 0; d < kCols; d += 16) {
    u32 b[4];
    ptx::ldmatrix_x4_trans(b, v.at(first_key, d));
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      ptx::mma_m16n8k16<T>(o.c[m][d / 8], a[m], b[0], b[1]);
      ptx::mma_m16n8k16<T>(o.c[m][d / 8 + 1], a[m], b[2], b[3]);
    }
  }
}

}  // namespace fa2
