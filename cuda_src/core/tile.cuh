// Where an element lives: in a shared tile (bytes) and in a register fragment (lane and register). Both conventions
// are stated here, once; tests/kernel/test_layout.py checks them against NumPy and against the PTX ISA's tables.
#pragma once

#include "core/ptx.cuh"

namespace fa2 {

// ---- shared tiles ---------------------------------------------------------------------------------------------------
//
// kRows x kCols 16-bit elements, cut by columns into panels 64 wide, then at most one 32 and one 16 wide (head_dim 80
// is 64 + 16). A panel holds its rows one after the other. Its unit is the 16-byte chunk of 8 elements, which is what
// cp.async writes and what one row of an ldmatrix matrix reads.
//
// The swizzle: chunk c of row r is stored in slot c ^ key(r). ldmatrix reads one chunk column of 8 consecutive rows at
// a time; those 8 chunks have to fall into 8 different 16-byte bank groups, of which there are 8 (32 banks x 4 bytes).
// A 64-wide row spans all 8 groups, so the key is r % 8; a 32-wide row spans 4 groups and two rows share a line, so the
// key is (r / 2) % 4; a 16-wide one spans 2, and the key is (r / 4) % 2.
template <int kRows, int kCols>
struct SharedTile {
  static_assert(kRows % 8 == 0 && kCols % 16 == 0, "a tile is made of whole 8 x 16 pieces");
  static constexpr int kNumRows = kRows;
  static constexpr int kNumCols = kCols;
  static constexpr int kBytes = kRows * kCols * 2;

  // The panel that holds column `col`: its width, its first column, and its first byte.
  static constexpr int panel_width(int col) {
    if (col < kCols / 64 * 64) return 64;
    return col < kCols / 32 * 32 ? 32 : 16;
  }
  static constexpr int panel_begin(int col) { return col / panel_width(col) * panel_width(col); }
  static constexpr int panel_offset(int col) { return panel_begin(col) * kRows * 2; }

  static constexpr int swizzle_key(int width, int row) {
    if (width == 64) return row % 8;
    return width == 32 ? row / 2 % 4 : row / 4 % 2;
  }
  // Byte of chunk `chunk` of row `row` within a panel of this width.
  static constexpr int chunk_offset(int width, int row, int chunk) {
    return row * width * 2 + ((chunk ^ swizzle_key(width, row)) << 4);
  }
};

// The address that one lane hands to ldmatrix, for a whole tile.
//
// A lane reads always the same row modulo 8 and the same chunk modulo 2, and steps by whole 8-row and 16-column pieces.
// Eight rows down, the key is the same: the step is an immediate. Two chunks across, the slot changes by an exclusive
// or with a constant, and since a panel is aligned beyond its row that is an exclusive or on the whole address. So one
// register per panel width serves the tile, and no index arithmetic is left in the main loop.
template <class Tile>
struct LaneAddress {
  u32 base_64, base_32, base_16;  // those that the tile has no panel for are never computed

  LaneAddress(u32 tile, int row, int chunk)
      : base_64(tile + Tile::chunk_offset(64, row, chunk)),
        base_32(tile + Tile::chunk_offset(32, row, chunk)),
        base_16(tile + Tile::chunk_offset(16, row, chunk)) {}

  // The same lane's address in another tile, `bytes` further on (a multiple of 128).
  LaneAddress advanced(int bytes) const {
    LaneAddress other = *this;
    other.base_64 += bytes, other.base_32 += bytes, other.base_16 += bytes;
    return other;
  }

  // The same lane's address `rows` further down or, negative, up: a multiple of 8, in tiles of 64-wide panels alone.
  LaneAddress moved(int rows) const {
    static_assert(Tile::kNumCols % 64 == 0, "narrower panels have shorter rows");
    return advanced(rows * 64 * 2);
  }

  // `row` a multiple of 8 and `col` a multiple of 16, both constants once loops are unrolled.
  u32 at(int row, int col) const {
    const int width = Tile::panel_width(col);
    const u32 base = width == 64 ? base_64 : width == 32 ? base_32 : base_16;
    return (base ^ ((col - Tile::panel_begin(col)) * 2)) + Tile::panel_offset(col) + row * width * 2;
  }
};

// Starts the copy of a tile from global memory: the rows from `first_row` on, as far as the source has rows and columns
// (`rows.count`, `rows.cols`), zeros elsewhere.
// `rows.cursor(row)` walks down the rows of the source. The last chunk of a row is read whole: where the columns are no
// multiple of 8, the source has zeros up to one. Zeros matter: a value row past the end meets a probability of 0, and
// 0 x whatever was there could be NaN.
//
// Consecutive threads take consecutive chunks of a row: 128 contiguous bytes of global memory per 8 lanes where the
// panel is 64 wide, and 8 different bank groups in shared memory always. From one round to the next a thread goes down
// by a multiple of 8 rows, which leaves its swizzle key alone.
template <class Tile, int kThreads, class Rows>
inline void copy_tile_async(u32 tile, const Rows& rows, int first_row) {
  const int thread = static_cast<int>(threadIdx.x);
  const int rows_valid = rows.count - first_row;
#pragma unroll
  for (int begin = 0; begin < Tile::kNumCols; begin += Tile::panel_width(begin)) {
    const int width = Tile::panel_width(begin);
    const int chunks_per_row = width / 8;
    const int rows_per_round = kThreads / chunks_per_row;
    const int thread_row = thread / chunks_per_row;
    const int chunk = thread % chunks_per_row;
    const int col = begin + chunk * 8;
    const u32 shared = tile + Tile::panel_offset(begin) + Tile::chunk_offset(width, thread_row, chunk);
    auto cursor = rows.cursor(first_row + thread_row);
#pragma unroll
    for (int round = 0; round * rows_per_round < Tile::kNumRows; ++round) {
      const int row = round * rows_per_round + thread_row;
      const bool whole_round = (round + 1) * rows_per_round <= Tile::kNumRows;
      if (whole_round || row < Tile::kNumRows) {
        const bool valid = row < rows_valid && col < rows.cols;
        ptx::cp_async_16(shared + round * rows_per_round * width * 2, cursor.pointer() + col * 2, valid ? 16 : 0);
      }
      cursor.advance(rows_per_round);
    }
  }
}

// ---- register fragments ---------------------------------------------------------------------------------------------
//
// The accumulator of mma.m16n8k16: of a 16 x 8 block lane l holds c[0], c[1] at row l / 4, columns 2 (l % 4) and
// 2 (l % 4) + 1, and c[2], c[3] eight rows below. A warp owns kMTiles such blocks one below the other, so a lane owns
// 2 kMTiles rows; "row index" counts those.

constexpr int kRowsPerMTile = 2;

inline int lane_id() { return static_cast<int>(threadIdx.x) % kWarpSize; }
inline int warp_id() { return static_cast<int>(threadIdx.x) / kWarpSize; }

// The row, in the warp's band, of a lane's row index.
inline int fragment_row(int row_index) { return row_index / 2 * 16 + row_index % 2 * 8 + lane_id() / 4; }
// The first of a lane's two adjacent columns in a block 8 wide.
inline int fragment_col() { return lane_id() % 4 * 2; }

// Sixteen columns of scores (or of probabilities) for all rows of a warp. This is the unit that masks, score modifiers
// and dropout see, by (row, column) and never by register; and packed to 16 bits it is the A operand of P V for the
// same sixteen keys, with no exchange between lanes.
template <int kMTiles>
struct ScoreChunk {
  static constexpr int kCols = 16;
  float c[kMTiles][2][4];

  void clear() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[m][n][i] = 0.f;
  }

  // body(value, row_index, col): `col` counts from the chunk's first column, less the lane's own fragment_col(), which
  // leaves it a constant.
  template <class Body>
  void visit(Body&& body) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) body(c[m][n][i], m * kRowsPerMTile + i / 2, n * 8 + i % 2);
  }

  // The 16 x 16 blocks as A operands: registers in the order (rows 0-7, keys 0-7), (rows 8-15, keys 0-7),
  // (rows 0-7, keys 8-15), (rows 8-15, keys 8-15).
  template <class T>
  void pack_operands(u32 (&a)[kMTiles][4]) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      a[m][0] = ptx::pack<T>(c[m][0][0], c[m][0][1]);
      a[m][1] = ptx::pack<T>(c[m][0][2], c[m][0][3]);
      a[m][2] = ptx::pack<T>(c[m][1][0], c[m][1][1]);
      a[m][3] = ptx::pack<T>(c[m][1][2], c[m][1][3]);
    }
  }
};

// The same for adjacent chunks, with `col` counted through them.
template <int kMTiles, int kChunks, class Body>
inline void visit_chunks(ScoreChunk<kMTiles> (&s)[kChunks], Body&& body) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk)
    s[chunk].visit([&](float& value, int r, int col) { body(value, r, chunk * ScoreChunk<kMTiles>::kCols + col); });
}

// The output accumulator: kMTiles * 16 rows by kCols columns.
template <int kMTiles, int kCols>
struct OutFragment {
  static constexpr int kNTiles = kCols / 8;
  float c[kMTiles][kNTiles][4];

  void clear() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[m][n][i] = 0.f;
  }

  void scale_rows(const float (&factor)[kMTiles * kRowsPerMTile]) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[m][n][i] *= factor[m * kRowsPerMTile + i / 2];
  }

  // Row r becomes own * it + others * other's. A factor of 0 drops what it belongs to, NaN included.
  void add_row(int r, float own, const OutFragment& other, float others) {
    const int m = r / kRowsPerMTile;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = r % kRowsPerMTile * 2; i < r % kRowsPerMTile * 2 + 2; ++i)
        c[m][n][i] = (own == 0.f ? 0.f : own * c[m][n][i]) + (others == 0.f ? 0.f : others * other.c[m][n][i]);
  }
};

}  // namespace fa2
