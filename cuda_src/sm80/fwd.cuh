// The forward of FlashAttention-2 for mma.sync, sm_80 and later.
//
// A block computes block_m query rows of one head. Q stays in shared memory, K and V pass through it in tiles of
// block_n keys, one ahead of the arithmetic. Warps are stacked along the rows, so that a row's softmax never leaves its
// warp; or teams of two warps are (core/team.cuh).
#pragma once

#include "core/gemm.cuh"
#include "core/softmax.cuh"
#include "core/team.cuh"
#include "policy/dropout.cuh"
#include "policy/epilogue.cuh"
#include "policy/lengths.cuh"
#include "policy/mask.cuh"
#include "policy/score.cuh"
#include "policy/score_array.cuh"
#include "policy/storage.cuh"
#include "policy/transport.cuh"
#include "sm80/work.cuh"

namespace fa2 {

// The quantities that shape the code. Mirrored by `FwdTile` in forward.py, which renders it.
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

// A kernel's policies where its unit names no others. A unit's `Config` begins with these, and adds what has no
// default: the tile (kTile), the element type of q, k and v (T), and what becomes of the results (Epilogue).
struct FwdDefaults {
  using Params = FwdParams;
  using Lengths = FullLengths;
  using Mask = NoMask;
  using Score = ScoreMods<>;
  using Dropout = NoDropout;
  using Storage = DenseStorage;
  using Transport = ThreadCopies;
};

template <class Config>
struct FwdKernel {
  static constexpr FwdTile kTile = Config::kTile;
  using T = typename Config::T;
  using Params = typename Config::Params;
  using Lengths = typename Config::Lengths;
  using Mask = typename Config::Mask::template Of<Lengths>;
  using Score = typename Config::Score;
  using Dropout = typename Config::Dropout;
  using Transport = typename Config::Transport;
  using Epilogue = typename Config::Epilogue;

  static constexpr int kThreads = kTile.num_warps * kWarpSize;
  static constexpr int kTeam = kTile.team;
  static constexpr int kRows = kTile.block_m * kTeam / kTile.num_warps;  // of a tile, a warp's
  static constexpr int kMTiles = kRows / 16;
  static constexpr int kKeys = kTile.block_n / kTeam;     // of a tile, those whose scores a warp computes
  static constexpr int kCols = kTile.head_dim_v / kTeam;  // of O, those that a warp owns
  static constexpr int kChunks = kKeys / ScoreChunk<kMTiles>::kCols;
  static_assert(kMTiles * 16 * kTile.num_warps == kTile.block_m * kTeam, "warps own whole 16-row blocks");
  static_assert(kChunks * ScoreChunk<kMTiles>::kCols * kTeam == kTile.block_n, "a key tile is made of whole chunks");
  static_assert(kTeam == 1 || kCols % 64 == 0, "a warp's part of V begins with a panel");

  using QTile = SharedTile<kTile.block_m, kTile.head_dim>;
  using KTile = SharedTile<kTile.block_n, kTile.head_dim>;
  using VTile = SharedTile<kTile.block_n, kTile.head_dim_v>;
  struct KeysAndValues {  // what the stream brings
    using First = KTile;
    using Second = VTile;
    static constexpr int kStages = kTile.stages;
    static constexpr int kThreads = FwdKernel::kThreads;
    static constexpr int kStep = kTile.last_to_first ? -1 : 1;
  };
  using Source = typename Transport::template Source<typename Config::Storage>;
  using Stream = typename Transport::template Stream<KeysAndValues, Source>;
  using WarpTeam = Team<kTeam, kTile.num_warps, kChunks, kMTiles>;
  // Dynamic shared memory: Q, what the teams want, then what the stream wants.
  static constexpr int kSharedBytes = QTile::kBytes + WarpTeam::kSharedBytes + Stream::kSharedBytes;

  static void run(const Params& params) {
    extern __shared__ __align__(Stream::kAlignment) char shared[];
    const u32 sQ = ptx::shared_address(shared);
    const WorkItem work = WorkItem::from_block<kTile.block_m, Mask::kRight>(params);
    const WarpTeam team(sQ + QTile::kBytes);
    const int warp_row = team.index() * kRows;
    const Span block_rows{work.first_row, kTile.block_m};
    const Span warp_rows{work.first_row + warp_row, kRows};

    const Lengths lengths(params, work.batch);
    const Mask mask(params, lengths);
    const auto tiles =
        KeyTiles<kTile.block_n>::of(mask, lengths, block_rows, kTile.mask_by_warp ? warp_rows : block_rows);

    OutFragment<kMTiles, kCols> o;
    ScoreContext context{params, work.batch, work.head, clamped_shift(lengths.diagonal()), Score::first_unit(params)};
    typename Score::template Of<kMTiles, kChunks> score(context);
    score.rows(warp_rows.first);
    typename Dropout::template Of<kMTiles, kChunks> dropout(params, work.batch, work.head);
    OnlineSoftmax<T, kMTiles, kTile.slack, Epilogue::kSumRounded> softmax(context.unit);
    o.clear();

    if (tiles.end > tiles.begin) {
      int n_block = kTile.last_to_first ? tiles.end - 1 : tiles.begin;

      copy_tile_async<QTile, kThreads>(sQ, DenseRows::queries(params, lengths, work.batch, work.head), work.first_row);
      ptx::cp_async_commit();
      Stream stream(sQ + QTile::kBytes + WarpTeam::kSharedBytes, Source::keys(params, lengths, work.batch, work.head_k),
                    Source::values(params, lengths, work.batch, work.head_k));
      stream.start(n_block, tiles.end - tiles.begin);
      ptx::cp_async_wait<Stream::kGroupsStarted>();
      ptx::barrier();  // Q has landed, and what `start` initialised can be seen

      const int team_key = team.rank() * kKeys;  // this warp's first key of a tile
      const QOperand<kTile.q_kept, QTile, kMTiles> q(sQ, warp_row);
      const auto k = col_operand<KTile>(stream.first, team_key);
      const auto v = row_operand<VTile>(stream.second + team.rank() * VTile::panel_offset(kCols), team_key);

      // One key tile after the other: S = Q K^T, P = softmax(S), O += P V.
      for (int left = tiles.end - tiles.begin; left > 0; --left, n_block += KeysAndValues::kStep) {
        const int first_key = n_block * kTile.block_n + team_key;
        ScoreChunk<kMTiles> s[kChunks];
        score.fetch(first_key);
        stream.acquire_first(n_block, left);
        dropout.draw(warp_rows.first, first_key);
        score.start(s, warp_rows.first, first_key);
        gemm_qk<T>(s, q, k.advanced(stream.first_offset()));
        stream.release_first(n_block, left);

        score.modify(s, warp_rows.first, first_key);
        // The row is added up here, and once more below: with `warp_rows.first`, known before the loop, the compiler
        // would keep each row's bound in a register through all of it.
        tiles.hide(s, mask, n_block, block_rows.first + warp_row, first_key);
        softmax.raise(s, o, team);

        stream.acquire_second();
        const auto v_tile = v.advanced(stream.second_offset());
        // Chunk by chunk, the exponentials of one among the mma of the one before; and this warp's keys first, while a
        // partner's probabilities are on their way.
        u32 p[WarpTeam::kHeld][kMTiles][4];
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          u32(&piece)[kMTiles][4] = p[chunk % WarpTeam::kHeld];
          softmax.exponentiate(s[chunk]);
          dropout.drop(s[chunk], chunk);
          s[chunk].template pack_operands<T>(piece);
          team.give(piece, chunk);
          gemm_pv<T>(o, piece, v_tile, chunk * ScoreChunk<kMTiles>::kCols);
        }
        team.template gemm_partners<T>(o, v_tile);
        stream.release_second();
      }
    }
    auto state = softmax.finish(o, team);
    Epilogue::store(params, Results::of(params, lengths, work.batch, work.head), lengths, work.head,
                    block_rows.first + warp_row, team.rank() * kCols, state, Dropout::rescale(params));
  }
};

}  // namespace fa2
