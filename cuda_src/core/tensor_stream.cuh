// A stream of tile pairs through tensor maps: one thread asks the copy engine of sm_90 for whole tiles, so that no
// other instruction, register or barrier of the block is spent on copies. See policy/transport.cuh for what a stream
// is.
#pragma once

#include "core/tile.cuh"

namespace fa2 {

// A ring of kStages buffers of each tile. Each has a barrier that counts its bytes in (`full`), and each pair one that
// counts the warps that are done with it (`empty`). No barrier spans the block: a warp may run ahead of the others.
//
// A source copies a box of 64 columns of a tile's rows, in the 128-byte swizzle. That is the swizzle of a 64-wide panel
// (tile.cuh) where the panel begins at a multiple of 1024 bytes.
template <class Tiles, class FirstSource, class SecondSource = FirstSource>
struct TensorStream {
  using First = typename Tiles::First;
  using Second = typename Tiles::Second;
  static constexpr int kStages = Tiles::kStages;
  static constexpr int kWarps = Tiles::kThreads / kWarpSize;
  static_assert(kStages >= 2, "a pair is copied while another is computed");
  static_assert(First::kNumCols % 64 == 0 && Second::kNumCols % 64 == 0, "a tensor map has one swizzle");
  static constexpr int kAlignment = 1024;
  static constexpr int kSharedBytes = kStages * (First::kBytes + Second::kBytes + 3 * 8);
  static constexpr int kGroupsStarted = 0;
  static constexpr int kAhead = kStages - 1;  // pairs that are on their way beyond the current one

  FirstSource first_boxes;
  SecondSource second_boxes;
  u32 first, second;         // where the tiles' first buffers begin
  int buffer = kStages - 1;  // of the pair being computed
  u32 phase = 1;             // parity of its barriers' phase: flips with every turn around the ring

  TensorStream(u32 shared, const FirstSource& first_boxes, const SecondSource& second_boxes)
      : first_boxes(first_boxes), second_boxes(second_boxes), first(shared), second(shared + kStages * First::kBytes) {}

  int first_offset() const { return buffer * First::kBytes; }
  int second_offset() const { return buffer * Second::kBytes; }

  // The block's next barrier shows the other threads what is initialised here.
  void start(int n, int left) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(full_first(i), 1);
        ptx::mbarrier_init(full_second(i), 1);
        ptx::mbarrier_init(empty(i), kWarps);
      }
      ptx::mbarrier_init_fence();
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (i < left) copy(n + i * Tiles::kStep, i);
    }
  }

  void acquire_first(int, int) {
    step(buffer, phase);
    ptx::mbarrier_wait(full_first(buffer), phase);
  }

  // The pair kAhead further on takes the buffers of the previous one. Once the first tile has been used, all warps are
  // most likely done with that. (On the first turn the buffers have never been used: waiting for the phase before the
  // first returns at once.)
  void release_first(int n, int left) {
    if (threadIdx.x == 0 && left > kAhead) {
      int free_buffer = buffer;
      u32 free_phase = phase;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) step(free_buffer, free_phase);
      ptx::mbarrier_wait(empty(free_buffer), free_phase ^ 1);
      copy(n + kAhead * Tiles::kStep, free_buffer);
    }
  }

  void acquire_second() { ptx::mbarrier_wait(full_second(buffer), phase); }

  void release_second() {
    ptx::warp_barrier();  // every lane's reads are done
    if (lane_id() == 0) ptx::mbarrier_arrive(empty(buffer));
  }

 private:
  u32 barriers() const { return second + kStages * Second::kBytes; }
  u32 full_first(int i) const { return barriers() + i * 8; }
  u32 full_second(int i) const { return barriers() + (kStages + i) * 8; }
  u32 empty(int i) const { return barriers() + (2 * kStages + i) * 8; }

  static void step(int& buffer, u32& phase) {
    buffer = buffer + 1 == kStages ? 0 : buffer + 1;
    phase ^= buffer == 0;
  }

  void copy(int n, int into) {
    copy_tile<First>(first + into * First::kBytes, first_boxes, n, full_first(into));
    copy_tile<Second>(second + into * Second::kBytes, second_boxes, n, full_second(into));
  }

  template <class Tile, class Source>
  static void copy_tile(u32 shared, const Source& boxes, int n, u32 barrier) {
    ptx::mbarrier_arrive_expect(barrier, Tile::kBytes);
#pragma unroll
    for (int col = 0; col < Tile::kNumCols; col += 64)
      boxes.copy(shared + Tile::panel_offset(col), n * Tile::kNumRows, col, barrier);
  }
};

}  // namespace fa2
