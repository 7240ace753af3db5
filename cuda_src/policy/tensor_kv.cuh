// Keys and values through tensor maps: one thread asks the copy engine of sm_90 for whole tiles, so that no other
// instruction, register or barrier of the block is spent on copies. See policy/kv.cuh for the protocol.
#pragma once

#include "core/tile.cuh"
#include "params.cuh"
#include "policy/lengths.cuh"

namespace fa2 {

// The maps describe (head_dim, seqlen, heads, batch), innermost first, with boxes of 64 x block_n x 1 x 1 and the
// 128-byte swizzle, which is that of a 64-wide panel (tile.cuh) where the panel begins at a multiple of 1024 bytes.
struct TensorKV {
  using Params = FwdTensorParams;

  // A ring of kStages buffers of K and of V. Each has a barrier that counts its bytes in (`full`), and each pair one
  // that counts the warps that are done with it (`empty`). No barrier spans the block: a warp may run ahead of the
  // others.
  template <class Tiles>
  struct Stream {
    using KTile = typename Tiles::KTile;
    using VTile = typename Tiles::VTile;
    static constexpr int kStages = Tiles::kStages;
    static constexpr int kWarps = Tiles::kThreads / kWarpSize;
    static_assert(kStages >= 2, "a tile is copied while another is computed");
    static_assert(KTile::kNumCols % 64 == 0 && VTile::kNumCols % 64 == 0, "a tensor map has one swizzle");
    static constexpr int kAlignment = 1024;
    static constexpr int kSharedBytes = kStages * (KTile::kBytes + VTile::kBytes + 3 * 8);
    static constexpr int kGroupsStarted = 0;
    static constexpr int kAhead = kStages - 1;  // tiles that are on their way beyond the current one

    const FwdTensorParams& params;
    u32 sK, sV;
    int batch, head_k;
    int buffer = kStages - 1;  // of the tile being computed
    u32 phase = 1;             // parity of its barriers' phase: flips with every turn around the ring

    Stream(const FwdTensorParams& params, const FullLengths&, u32 shared, int batch, int head_k)
        : params(params), sK(shared), sV(shared + kStages * KTile::kBytes), batch(batch), head_k(head_k) {}

    int k_offset() const { return buffer * KTile::kBytes; }
    int v_offset() const { return buffer * VTile::kBytes; }

    // The block's next barrier shows the other threads what is initialised here.
    void start(int n_block, int left) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
          ptx::mbarrier_init(full_k(i), 1);
          ptx::mbarrier_init(full_v(i), 1);
          ptx::mbarrier_init(empty(i), kWarps);
        }
        ptx::mbarrier_init_fence();
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
          if (i < left) copy(n_block + i * Tiles::kStep, i);
      }
    }

    void acquire_k(int, int) {
      step(buffer, phase);
      ptx::mbarrier_wait(full_k(buffer), phase);
    }

    // The tile kAhead further on takes the buffers of the previous one. After Q K^T all warps are most likely done with
    // it. (On the first turn the buffers have never been used: waiting for the phase before the first returns at once.)
    void release_k(int n_block, int left) {
      if (threadIdx.x == 0 && left > kAhead) {
        int free_buffer = buffer;
        u32 free_phase = phase;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) step(free_buffer, free_phase);
        ptx::mbarrier_wait(empty(free_buffer), free_phase ^ 1);
        copy(n_block + kAhead * Tiles::kStep, free_buffer);
      }
    }

    void acquire_v() { ptx::mbarrier_wait(full_v(buffer), phase); }

    void release_v() {
      ptx::warp_barrier();  // every lane's reads are done
      if (lane_id() == 0) ptx::mbarrier_arrive(empty(buffer));
    }

   private:
    u32 barriers() const { return sV + kStages * VTile::kBytes; }
    u32 full_k(int i) const { return barriers() + i * 8; }
    u32 full_v(int i) const { return barriers() + (kStages + i) * 8; }
    u32 empty(int i) const { return barriers() + (2 * kStages + i) * 8; }

    static void step(int& buffer, u32& phase) {
      buffer = buffer + 1 == kStages ? 0 : buffer + 1;
      phase ^= buffer == 0;
    }

    void copy(int n_block, int into) {
      copy_tile<KTile>(sK + into * KTile::kBytes, &params.k_map, n_block, full_k(into));
      copy_tile<VTile>(sV + into * VTile::kBytes, &params.v_map, n_block, full_v(into));
    }

    template <class Tile>
    void copy_tile(u32 shared, const TensorMap* map, int n_block, u32 barrier) {
      ptx::mbarrier_arrive_expect(barrier, Tile::kBytes);
#pragma unroll
      for (int col = 0; col < Tile::kNumCols; col += 64)
        ptx::copy_tensor_4d(shared + Tile::panel_offset(col), map, col, n_block * Tile::kNumRows, head_k, batch,
                            barrier);
    }
  };
};

}  // namespace fa2
