// K and V tiles by cp.async, for any source that can walk down its rows. See policy/kv.cuh for the protocol.
#pragma once

#include "core/tile.cuh"
#include "params.cuh"

namespace fa2 {

// Two stages: K and V are double-buffered, both tiles of the next block copied while this one is computed, with a
// single barrier per block. One stage: each has one buffer, and V is copied during Q K^T, the next K during softmax and
// P V.
template <class Tiles, class Rows>
struct CopyStream {
  using KTile = typename Tiles::KTile;
  using VTile = typename Tiles::VTile;
  static constexpr int kStages = Tiles::kStages;
  static_assert(kStages == 1 || kStages == 2, "one buffer or two");
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kAlignment = 128;
  static constexpr int kSharedBytes = kStages * (KTile::kBytes + VTile::kBytes);
  static constexpr int kGroupsStarted = 1;  // cp.async groups that `start` leaves in flight

  using Lengths = typename Tiles::Lengths;

  const FwdParams& params;
  const Lengths& lengths;
  Rows keys, values;
  u32 sK, sV;
  int buffer = kStages - 1;  // of the tile being computed; flipped, or left at 0, by acquire_k

  CopyStream(const FwdParams& params, const Lengths& lengths, u32 shared, const Rows& keys, const Rows& values)
      : params(params),
        lengths(lengths),
        keys(keys),
        values(values),
        sK(shared),
        sV(shared + kStages * KTile::kBytes) {}

  int k_offset() const { return buffer * KTile::kBytes; }
  int v_offset() const { return buffer * VTile::kBytes; }

  void start(int n_block, int) {
    copy_k(n_block, 0);
    if constexpr (kStages == 2) copy_v(n_block, 0);
    ptx::cp_async_commit();
  }

  void acquire_k(int n_block, int left) {
    ptx::cp_async_wait<0>();  // this thread's part of K (two stages: and of V) has landed
    ptx::barrier();           // everyone's has, and every warp is done with the previous tile
    if constexpr (kStages == 2) {
      buffer ^= 1;
      if (left > 1) {
        copy_k(n_block + Tiles::kStep, buffer ^ 1);
        copy_v(n_block + Tiles::kStep, buffer ^ 1);
      }
    } else {
      copy_v(n_block, 0);
    }
    ptx::cp_async_commit();
  }

  void release_k(int n_block, int left) {
    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();  // this thread's part of V has landed
      ptx::barrier();           // everyone's has, and every warp is done reading K
      if (left > 1) copy_k(n_block + Tiles::kStep, 0);
      ptx::cp_async_commit();
    }
  }

  void acquire_v() {}  // has landed: see above
  void release_v() {}  // the next acquire_k has a barrier

 private:
  void copy_k(int n_block, int into) {
    const int first = n_block * KTile::kNumRows;
    copy_tile_async<KTile, kThreads>(sK + into * KTile::kBytes, keys, first, lengths.seqlen_k(), params.head_dim);
  }
  void copy_v(int n_block, int into) {
    const int first = n_block * VTile::kNumRows;
    copy_tile_async<VTile, kThreads>(sV + into * VTile::kBytes, values, first, lengths.seqlen_k(), params.head_dim_v);
  }
};

}  // namespace fa2
