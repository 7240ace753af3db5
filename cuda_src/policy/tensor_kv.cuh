// Keys and values through tensor maps: one thread asks the copy engine of sm_90 for whole tiles, so that no other
// instruction, register or barrier of the block is spent on copies. See policy/kv.cuh for the protocol.
#pragma once

#include "core/tile.cuh"
#include "params.cuh"

namespace fa2 {

// What cuTensorMapEncodeTiled writes: an array's address, sizes and strides, and the box that a copy takes.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// The maps describe (head_dim, seqlen, heads, batch), innermost first, with boxes of 64 x block_n x 1 x 1 and the
// 128-byte swizzle, which is that of a 64-wide panel (tile.cuh) where the panel begins at a multiple of 1024 bytes.
struct FwdTensorParams : FwdParams {
  TensorMap k_map, v_map;
};
static_assert(sizeof(FwdTensorParams) == kFwdTensorParamsBytes);

struct TensorKV {
  using Params = FwdTensorParams;

  // Double-buffered. Each buffer of K and of V has a barrier that counts its bytes in (`full`), and each pair one that
  // counts the warps that are done with it (`empty`). No barrier spans the block: a warp may run a tile ahead.
  template <class Tiles>
  struct Stream {
    using KTile = typename Tiles::KTile;
    using VTile = typename Tiles::VTile;
    static constexpr int kWarps = Tiles::kThreads / kWarpSize;
    static_assert(Tiles::kStages == 2, "tensor copies are double-buffered");
    static_assert(KTile::kNumCols % 64 == 0 && VTile::kNumCols % 64 == 0, "a tensor map has one swizzle");
    static constexpr int kAlignment = 1024;
    static constexpr int kSharedBytes = 2 * (KTile::kBytes + VTile::kBytes) + 6 * 8;
    static constexpr int kGroupsStarted = 0;

    const FwdTensorParams& params;
    u32 sK, sV;
    int batch, head_k;
    int tile = -1;  // the how manieth tile is being computed

    Stream(const FwdTensorParams& params, u32 shared, int batch, int head_k)
        : params(params), sK(shared), sV(shared + 2 * KTile::kBytes), batch(batch), head_k(head_k) {}

    int k_offset() const { return tile % 2 * KTile::kBytes; }
    int v_offset() const { return tile % 2 * VTile::kBytes; }

    // The block's next barrier shows the others that these are initialised.
    void start(int n_block) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int buffer = 0; buffer < 2; ++buffer) {
          ptx::mbarrier_init(full_k(buffer), 1);
          ptx::mbarrier_init(full_v(buffer), 1);
          ptx::mbarrier_init(empty(buffer), kWarps);
        }
        ptx::mbarrier_init_fence();
        copy(n_block, 0);
      }
    }

    void acquire_k(int, int, bool) {
      ++tile;
      ptx::mbarrier_wait(full_k(tile % 2), tile / 2 % 2);
    }

    // The other pair of buffers held the previous tile. Warps are rarely more than half a tile apart, so that here,
    // after Q K^T, all are done with it, and there is half a tile's time until the next one is needed.
    void release_k(int next, bool has_next) {
      if (threadIdx.x == 0 && has_next) {
        if (tile > 0) ptx::mbarrier_wait(empty((tile - 1) % 2), (tile - 1) / 2 % 2);
        copy(next, (tile + 1) % 2);
      }
    }

    void acquire_v() { ptx::mbarrier_wait(full_v(tile % 2), tile / 2 % 2); }

    void release_v() {
      ptx::warp_barrier();  // every lane's reads are done
      if (lane_id() == 0) ptx::mbarrier_arrive(empty(tile % 2));
    }

   private:
    u32 barriers() const { return sV + 2 * VTile::kBytes; }
    u32 full_k(int buffer) const { return barriers() + buffer * 8; }
    u32 full_v(int buffer) const { return barriers() + 16 + buffer * 8; }
    u32 empty(int buffer) const { return barriers() + 32 + buffer * 8; }

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
