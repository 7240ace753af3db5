// The forward of FlashAttention-2 for mma.sync, sm_80 and later.
//
// A block computes kBlockM query rows of one head. Q stays in shared memory, K and V pass through it in tiles of
// kBlockN keys, one ahead of the arithmetic. Warps are stacked along the rows, so that a row's softmax never leaves its
// warp; or teams of two warps are (core/team.cuh).
#pragma once

#include "core/gemm.cuh"
#include "core/softmax.cuh"
#include "core/team.cuh"
#include "policy/dropout.cuh"
#include "policy/epilogue.cuh"
#include "policy/kv.cuh"
#include "policy/lengths.cuh"
#include "policy/mask.cuh"
#include "policy/score.cuh"
#include "policy/score_array.cuh"
#include "sm80/work.cuh"

namespace fa2 {

// The quantities that shape the code. Mirrored by `FwdTile` in spec.py, which renders it.
struct FwdTile {
  int block_m, block_n;      // query rows and keys of a tile
  int head_dim, head_dim_v;  // rounded up to 16
  int num_warps;
  int stages;          // 2: K and V are double-buffered; 1: each has one buffer, refilled as soon as it is free
  int slack;           // log2 by which a row maximum may grow before O is rescaled (softmax.cuh)
  bool last_to_first;  // the order of the key tiles
  int q_kept;          // columns of Q whose fragments stay in registers; the others are read again for every key tile
  int team;            // warps that share rows: 1 or 2 (team.cuh)
  bool mask_by_warp;   // a key tile is masked where the warp's rows, not the block's, do not all see it whole
};

template <FwdTile kTile, class T, class Lengths_, template <class> class Mask_, class Score, class Dropout, class KV,
          class Epilogue>
struct FwdKernel {
  using Lengths = Lengths_;
  using Mask = Mask_<Lengths>;
  static constexpr int kThreads = kTile.num_warps * kWarpSize;
  static constexpr int kTeam = kTile.team;
  static constexpr int kMTiles = kTile.block_m * kTeam / kTile.num_warps / 16;
  static constexpr int kKeys = kTile.block_n / kTeam;     // of a tile, those whose scores a warp computes
  static constexpr int kCols = kTile.head_dim_v / kTeam;  // of O, those that a warp owns
  static constexpr int kChunks = kKeys / ScoreChunk<kMTiles>::kCols;
  static_assert(kMTiles * 16 * kTile.num_warps == kTile.block_m * kTeam, "warps own whole 16-row blocks");
  static_assert(kChunks * ScoreChunk<kMTiles>::kCols * kTeam == kTile.block_n, "a key tile is made of whole chunks");
  static_assert(kTeam == 1 || kCols % 64 == 0, "a warp's part of V begins with a panel");

  struct Tiles {
    using KTile = SharedTile<kTile.block_n, kTile.head_dim>;
    using VTile = SharedTile<kTile.block_n, kTile.head_dim_v>;
    static constexpr int kStages = kTile.stages;
    static constexpr int kThreads = FwdKernel::kThreads;
    using Lengths = FwdKernel::Lengths;
    static constexpr int kStep = kTile.last_to_first ? -1 : 1;
  };
  using QTile = SharedTile<kTile.block_m, kTile.head_dim>;
  using Stream = typename KV::template Stream<Tiles>;
  using Params = typename KV::Params;
  using WarpTeam = Team<kTeam, kTile.num_warps, kChunks, kMTiles>;
  // Dynamic shared memory: Q, what the teams want, then what the stream wants.
  static constexpr int kSharedBytes = QTile::kBytes + WarpTeam::kSharedBytes + Stream::kSharedBytes;

  static void run(const Params& params) {
    extern __shared__ __align__(Stream::kAlignment) char shared[];
    const WorkItem work = WorkItem::from_block<kTile.block_m, Mask::kRight>(params);
    const Lengths lengths(params, work.batch);
    const Mask mask(params, lengths);
    const u32 sQ = ptx::shared_address(shared);
    const WarpTeam team(sQ + QTile::kBytes);
    const int warp_row = team.index() * kMTiles * 16;

    const Span block_rows{work.first_row, kTile.block_m};
    const Span warp_rows{work.first_row + warp_row, kMTiles * 16};
    const auto tiles =
        KeyTiles<kTile.block_n>::of(mask, lengths, block_rows, kTile.mask_by_warp ? warp_rows : block_rows);

    OutFragment<kMTiles, kCols> o;
    ScoreContext context{params, work.batch, work.head, clamped_shift(lengths.diagonal()), Score::first_unit(params)};
    typename Score::template Of<kMTiles, kChunks> score(context);
    typename Dropout::template Of<kMTiles, kChunks> dropout(params, work.batch, work.head);
    OnlineSoftmax<T, kMTiles, kTile.slack, Epilogue::kSumRounded> softmax(context.unit);
    o.clear();

    if (tiles.end > tiles.begin) {
      const u32 sK = sQ + QTile::kBytes + WarpTeam::kSharedBytes;
      int n_block = kTile.last_to_first ? tiles.end - 1 : tiles.begin;

      copy_tile_async<QTile, kThreads>(sQ, query_rows(params, work.batch, work.head), work.first_row,
                                       lengths.seqlen_q(), params.head_dim);
      ptx::cp_async_commit();
      Stream stream(params, lengths, sK, work.batch, work.head_k);
      stream.start(n_block, tiles.end - tiles.begin);
      ptx::cp_async_wait<Stream::kGroupsStarted>();
      ptx::barrier();  // Q has landed, and what `start` initialised can be seen

      const int team_key = team.rank() * kKeys;  // this warp's first key of a tile
      const QOperand<kTile.q_kept, QTile, kMTiles> q(sQ, warp_row);
      const auto k = col_operand<typename Tiles::KTile>(stream.sK, team_key);
      const auto v =
          row_operand<typename Tiles::VTile>(stream.sV + team.rank() * Tiles::VTile::panel_offset(kCols), team_key);

      // One key tile after the other: S = Q K^T, P = softmax(S), O += P V.
      for (int left = tiles.end - tiles.begin; left > 0; --left, n_block += Tiles::kStep) {
        const int first_key = n_block * kTile.block_n + team_key;
        ScoreChunk<kMTiles> s[kChunks];
        score.fetch(warp_rows.first, first_key);
        stream.acquire_k(n_block, left);
        dropout.draw(warp_rows.first, first_key);
        score.start(s, warp_rows.first, first_key);
        gemm_qk<T>(s, q, k.advanced(stream.k_offset()));
        stream.release_k(n_block, left);

        score.modify(s, warp_rows.first, first_key);
        // The row is added up here: with `warp_rows.first`, known before the loop, the compiler would keep each row's
        // bound in a register through all of it.
        tiles.hide(s, mask, n_block, block_rows.first + warp_row, first_key);
        softmax.raise(s, o, team);

        stream.acquire_v();
        const auto v_tile = v.advanced(stream.v_offset());
        // Chunk by chunk, the exponentials of one among the mma of the one before.
        const auto probabilities = [&](u32(&p)[kMTiles][4], int chunk) {
          softmax.exponentiate(s[chunk]);
          dropout.drop(s[chunk], chunk);
          s[chunk].template pack_operands<T>(p);
        };
        if constexpr (kTeam == 1) {
          u32 p[kMTiles][4];
#pragma unroll
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            probabilities(p, chunk);
            gemm_pv<T>(o, p, v_tile, chunk * ScoreChunk<kMTiles>::kCols);
          }
        } else {
          // This warp's keys first, while the partner's probabilities are on their way.
          u32 p[kChunks][kMTiles][4];
#pragma unroll
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            probabilities(p[chunk], chunk);
            team.give(p[chunk], chunk);
            if (chunk == kChunks - 1) team.all_given();
            gemm_pv<T>(o, p[chunk], v_tile, chunk * ScoreChunk<kMTiles>::kCols);
          }
          team.await_partner();
          const auto v_partner = v_tile.advanced((1 - 2 * team.rank()) * kKeys * 128);  // rows of 64-wide panels
#pragma unroll
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            team.take(p[chunk], chunk);
            gemm_pv<T>(o, p[chunk], v_partner, chunk * ScoreChunk<kMTiles>::kCols);
          }
        }
        stream.release_v();
      }
    }
    softmax.finish(team);
    Epilogue::store(params, lengths, work, warp_row, team.rank() * kCols, o, softmax, Dropout::rescale(params));
  }
};

}  // namespace fa2
