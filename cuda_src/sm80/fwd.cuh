// The forward of FlashAttention-2 for mma.sync, sm_80 and later.
//
// A block computes kBlockM query rows of one head. Q stays in shared memory, K and V pass through it in tiles of
// kBlockN keys, one ahead of the arithmetic. Warps are stacked along the rows, so that a row's softmax never leaves its
// warp.
#pragma once

#include "core/gemm.cuh"
#include "core/softmax.cuh"
#include "core/work.cuh"
#include "policy/epilogue.cuh"
#include "policy/kv.cuh"
#include "policy/mask.cuh"
#include "policy/score.cuh"

namespace fa2 {

// The quantities that shape the code. Mirrored by `FwdTile` in spec.py, which renders it.
struct FwdTile {
  int block_m, block_n;      // query rows and keys of a tile
  int head_dim, head_dim_v;  // rounded up to 16
  int num_warps;
  int stages;          // 2: K and V are double-buffered; 1: each has one buffer, refilled as soon as it is free
  int slack;           // log2 by which a row maximum may grow before O is rescaled (softmax.cuh)
  bool last_to_first;  // the order of the key tiles
};

template <FwdTile kTile, class T, class Mask, class Score, class KV, class Epilogue>
struct FwdKernel {
  static constexpr int kThreads = kTile.num_warps * kWarpSize;
  static constexpr int kMTiles = kTile.block_m / kTile.num_warps / 16;
  static constexpr int kChunks = kTile.block_n / ScoreChunk<kMTiles>::kCols;
  static_assert(kMTiles * 16 * kTile.num_warps == kTile.block_m, "warps own whole 16-row blocks");
  static_assert(kChunks * ScoreChunk<kMTiles>::kCols == kTile.block_n, "a key tile is made of whole chunks");
  static_assert(kTile.stages == 1 || kTile.stages == 2, "one buffer or two");

  using QTile = SharedTile<kTile.block_m, kTile.head_dim>;
  using KTile = SharedTile<kTile.block_n, kTile.head_dim>;
  using VTile = SharedTile<kTile.block_n, kTile.head_dim_v>;
  using Rows = typename KV::Rows;
  // Dynamic shared memory: Q | K x stages | V x stages.
  static constexpr int kSharedBytes = QTile::kBytes + kTile.stages * (KTile::kBytes + VTile::kBytes);

  // The stream of K and V tiles. Its contract: between `acquire_k` and `acquire_v` the K tile may be read, between
  // `acquire_v` and the next `acquire_k` the V tile; each acquire starts the copies that its barrier has made room for.
  struct Stream {
    const FwdParams& params;
    Rows keys, values;
    u32 sK, sV;
    int buffer;  // of the tile being computed; always 0 with one stage

    void copy_k(int n_block, int into) {
      const int first = n_block * kTile.block_n;
      copy_tile_async<KTile, kThreads>(sK + into * KTile::kBytes, keys.from(first), params.seqlen_k - first,
                                       params.head_dim);
    }
    void copy_v(int n_block, int into) {
      const int first = n_block * kTile.block_n;
      copy_tile_async<VTile, kThreads>(sV + into * VTile::kBytes, values.from(first), params.seqlen_k - first,
                                       params.head_dim_v);
    }

    // Before the first tile, in one group with whatever the caller has already started (Q).
    void start(int n_block) {
      copy_k(n_block, 0);
      if constexpr (kTile.stages == 2) copy_v(n_block, 0);
      ptx::cp_async_commit();
      buffer = kTile.stages - 1;  // flipped, or left at 0, by the first acquire_k
    }

    void acquire_k(int n_block, int next, bool has_next) {
      ptx::cp_async_wait<0>();  // this thread's part of K (two stages: and of V) has landed
      ptx::barrier();           // everyone's has, and every warp is done with the previous tile's V
      if constexpr (kTile.stages == 2) {
        buffer ^= 1;
        if (has_next) {
          copy_k(next, buffer ^ 1);
          copy_v(next, buffer ^ 1);
        }
      } else {
        copy_v(n_block, 0);
      }
      ptx::cp_async_commit();
    }

    void acquire_v(int next, bool has_next) {
      if constexpr (kTile.stages == 1) {
        ptx::cp_async_wait<0>();  // this thread's part of V has landed
        ptx::barrier();           // everyone's has, and every warp is done reading K
        if (has_next) copy_k(next, 0);
        ptx::cp_async_commit();
      }
    }
  };

  static void run(const FwdParams& params) {
    extern __shared__ __align__(128) char shared[];
    const WorkItem work = WorkItem::from_block<kTile.block_m, Mask::kCausal>(params);
    const Mask mask(params, work.batch);
    const int warp_row = warp_id() * kMTiles * 16;

    // Key tiles [0, n_end) are seen by some row, [0, n_full) whole by every row.
    const int last_row = min(work.row_begin + kTile.block_m, params.seqlen_q) - 1;
    const int n_end = ceil_div(mask.row_end(last_row), kTile.block_n);
    const int n_full = mask.row_end(work.row_begin) / kTile.block_n;

    OutFragment<kMTiles, kTile.head_dim_v> o;
    OnlineSoftmax<kMTiles, kTile.slack> softmax(params.scale_log2);
    o.clear();

    if (n_end > 0) {
      const u32 sQ = ptx::shared_address(shared);
      const u32 sK = sQ + QTile::kBytes;
      const u32 sV = sK + kTile.stages * KTile::kBytes;
      constexpr int kStep = kTile.last_to_first ? -1 : 1;
      int n_block = kTile.last_to_first ? n_end - 1 : 0;

      copy_tile_async<QTile, kThreads>(sQ, KV::queries(params, work.batch, work.head).from(work.row_begin),
                                       params.seqlen_q - work.row_begin, params.head_dim);
      Stream stream{
          params, KV::keys(params, work.batch, work.head_k), KV::values(params, work.batch, work.head_k), sK, sV, 0};
      stream.start(n_block);

      const auto q = row_operand<QTile>(sQ, warp_row);
      const auto k = col_operand<KTile>(sK);
      const auto v = row_operand<VTile>(sV, 0);

      // One key tile after the other: S = Q K^T, P = softmax(S), O += P V.
      for (int left = n_end; left > 0; --left, n_block += kStep) {
        ScoreChunk<kMTiles> s[kChunks];
        stream.acquire_k(n_block, n_block + kStep, left > 1);
        gemm_qk<T>(s, q, k.advanced(stream.buffer * KTile::kBytes));
        stream.acquire_v(n_block + kStep, left > 1);

        if constexpr (!Score::kNone) modify(s);
        if (n_block >= n_full) hide(s, mask, work.row_begin + warp_row, n_block * kTile.block_n);
        softmax.raise(s, o);
        const auto v_tile = v.advanced(stream.buffer * VTile::kBytes);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          softmax.exponentiate(s[chunk]);
          gemm_pv<T>(o, s[chunk], v_tile, chunk * ScoreChunk<kMTiles>::kCols);
        }
      }
    }
    Epilogue::store(params, work, warp_row, o, softmax);
  }

 private:
  static void modify(ScoreChunk<kMTiles> (&s)[kChunks]) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      s[chunk].visit([](float& value, int, int) { value = Score::apply(value); });
  }

  // Sets the scores that a row may not see to -inf.
  static void hide(ScoreChunk<kMTiles> (&s)[kChunks], const Mask& mask, int first_row, int first_key) {
    int visible[kMTiles * kRowsPerMTile];  // per row: how many columns, from the lane's first on
#pragma unroll
    for (int r = 0; r < kMTiles * kRowsPerMTile; ++r)
      visible[r] = mask.row_end(first_row + fragment_row(r)) - first_key - fragment_col();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      s[chunk].visit([&](float& value, int r, int col) {
        if (chunk * ScoreChunk<kMTiles>::kCols + col >= visible[r]) value = -kInfinity;
      });
  }
};

}  // namespace fa2
