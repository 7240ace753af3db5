// The warps that share a band of query rows: one, or a pair.
//
// A pair of warps reads half as much shared memory per mma as two warps with rows of their own: each computes the
// scores of all rows with half of the keys, and owns half of O's columns. The price is an exchange. Both need the same
// references, so they agree on the maxima; and each needs the other's probabilities. These are given lane to lane,
// since a lane's part of an A operand is the same in both warps: no layout, no ldmatrix, no bank conflict.
#pragma once

#include "core/gemm.cuh"

namespace fa2 {

// One warp. A row never leaves it.
template <int kWarpsPerTeam, int kNumWarps, int kChunks, int kMTiles>
struct Team {
  static_assert(kWarpsPerTeam == 1, "a team is a warp or a pair");
  static constexpr int kSharedBytes = 0;
  explicit Team(u32) {}

  static int index() { return warp_id(); }
  static int rank() { return 0; }
  static bool any(bool predicate) { return ptx::any(predicate); }
  template <int kRows, class Merge>
  static void combine(float (&)[kRows], Merge&&) {}

  static constexpr int kHeld = 1;  // chunks of probabilities that the main loop keeps at a time
  // There is no partner to give them to, and none whose keys are left.
  static void give(const u32 (&)[kMTiles][4], int) {}
  template <class T, int kCols, class VTile>
  static void gemm_partners(OutFragment<kMTiles, kCols>&, const LaneAddress<VTile>&) {}
};

// A pair. Each warp has a mailbox in shared memory, which it alone writes and its partner alone reads. It is free again
// after the next `any`, which the partner reaches only once it has taken everything.
template <int kNumWarps, int kChunks, int kMTiles>
struct Team<2, kNumWarps, kChunks, kMTiles> {
  static constexpr int kMailboxBytes = kChunks * kMTiles * kWarpSize * 16;
  static constexpr int kSharedBytes = kNumWarps * kMailboxBytes;
  static constexpr int kThreads = 2 * kWarpSize;
  static constexpr int kBarriers = 3;  // per team: one where both meet, and for each warp one that says it has given
  static_assert(1 + kNumWarps / 2 * kBarriers <= 16, "a block has 16 barriers, of which it uses one itself");

  u32 own, partners;  // this lane's places in the two mailboxes

  explicit Team(u32 mailboxes)
      : own(mailboxes + mailbox(rank()) * kMailboxBytes + lane_id() * 16),
        partners(mailboxes + mailbox(1 - rank()) * kMailboxBytes + lane_id() * 16) {}

  static int index() { return warp_id() / 2; }
  static int rank() { return warp_id() % 2; }

  // True on both warps if `predicate` is true on any lane of either. They meet.
  static bool any(bool predicate) { return ptx::barrier_any<kThreads>(meeting(), predicate); }

  // Merges what both warps have of each row; both get the same.
  template <int kRows, class Merge>
  void combine(float (&x)[kRows], Merge&& merge) const {
    static_assert(kRows == 4, "four rows a lane are one word of 16 bytes");
    u32 words[4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) words[r] = __float_as_uint(x[r]);
    ptx::barrier_sync<kThreads>(meeting());  // the partner has taken what was in the mailbox
    ptx::store_shared(own, words);
    ptx::barrier_sync<kThreads>(meeting());  // both have given
    ptx::load_shared(words, partners);
    ptx::barrier_sync<kThreads>(meeting());  // both have taken
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = merge(x[r], __uint_as_float(words[r]));
  }

  static constexpr int kHeld = kChunks;

  // Gives a chunk of probabilities, as A operands, to the partner. With the last one this warp goes on: all are given.
  void give(const u32 (&p)[kMTiles][4], int chunk) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) ptx::store_shared(own + offset(chunk, m), p[m]);
    if (chunk == kChunks - 1) all_given();
  }

  // O += P V for the partner's keys, once it has given all its chunks; `v` is where this warp's keys begin.
  template <class T, int kCols, class VTile>
  void gemm_partners(OutFragment<kMTiles, kCols>& o, const LaneAddress<VTile>& v) const {
    constexpr int kChunkKeys = ScoreChunk<kMTiles>::kCols;
    await_partner();
    const auto partners_v = v.moved((1 - 2 * rank()) * kChunks * kChunkKeys);  // below our keys, or above them
    u32 p[kChunks][kMTiles][4];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      take(p[chunk], chunk);
      fa2::gemm_pv<T>(o, p[chunk], partners_v, chunk * kChunkKeys);
    }
  }

 private:
  // All chunks are given; this warp goes on.
  static void all_given() { ptx::barrier_arrive<kThreads>(given(rank())); }
  // Waits until the partner has given all its chunks.
  static void await_partner() { ptx::barrier_sync<kThreads>(given(1 - rank())); }
  void take(u32 (&p)[kMTiles][4], int chunk) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) ptx::load_shared(p[m], partners + offset(chunk, m));
  }

  static int mailbox(int rank) { return index() * 2 + rank; }
  static constexpr int offset(int chunk, int m) { return (chunk * kMTiles + m) * kWarpSize * 16; }
  static u32 meeting() { return 1 + index() * kBarriers; }
  static u32 given(int rank) { return 2 + index() * kBarriers + rank; }
};

}  // namespace fa2
