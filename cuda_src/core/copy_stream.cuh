// A stream of tile pairs by cp.async, from any two sources that can walk down their rows. See policy/transport.cuh for
// what a stream is.
#pragma once

#include "core/tile.cuh"

namespace fa2 {

// Two stages: both tiles are double-buffered, those of the next pair copied while this one is computed, with a single
// barrier per pair. One stage: each tile has one buffer; the second one is copied while the first is in use, and the
// next pair's first one while the second is.
template <class Tiles, class FirstSource, class SecondSource = FirstSource>
struct CopyStream {
  using First = typename Tiles::First;
  using Second = typename Tiles::Second;
  static constexpr int kStages = Tiles::kStages;
  static_assert(kStages == 1 || kStages == 2, "one buffer or two");
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kAlignment = 128;
  static constexpr int kSharedBytes = kStages * (First::kBytes + Second::kBytes);
  static constexpr int kGroupsStarted = 1;  // cp.async groups that `start` leaves in flight

  FirstSource first_rows;
  SecondSource second_rows;
  u32 first, second;         // where the tiles' first buffers begin
  int buffer = kStages - 1;  // of the pair being computed; flipped, or left at 0, by acquire_first

  CopyStream(u32 shared, const FirstSource& first_rows, const SecondSource& second_rows)
      : first_rows(first_rows), second_rows(second_rows), first(shared), second(shared + kStages * First::kBytes) {}

  int first_offset() const { return buffer * First::kBytes; }
  int second_offset() const { return buffer * Second::kBytes; }

  void start(int n, int) {
    copy_first(n, 0);
    if constexpr (kStages == 2) copy_second(n, 0);
    ptx::cp_async_commit();
  }

  void acquire_first(int n, int left) {
    ptx::cp_async_wait<0>();  // this thread's part of the first tile (two stages: of both) has landed
    ptx::barrier();           // everyone's has, and every warp is done with the previous pair
    if constexpr (kStages == 2) {
      buffer ^= 1;
      if (left > 1) {
        copy_first(n + Tiles::kStep, buffer ^ 1);
        copy_second(n + Tiles::kStep, buffer ^ 1);
      }
    } else {
      copy_second(n, 0);
    }
    ptx::cp_async_commit();
  }

  void release_first(int n, int left) {
    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();  // this thread's part of the second tile has landed
      ptx::barrier();           // everyone's has, and every warp is done reading the first
      if (left > 1) copy_first(n + Tiles::kStep, 0);
      ptx::cp_async_commit();
    }
  }

  void acquire_second() {}  // has landed: see above
  void release_second() {}  // the next acquire_first has a barrier

 private:
  void copy_first(int n, int into) {
    copy_tile_async<First, kThreads>(first + into * First::kBytes, first_rows, n * First::kNumRows);
  }
  void copy_second(int n, int into) {
    copy_tile_async<Second, kThreads>(second + into * Second::kBytes, second_rows, n * Second::kNumRows);
  }
};

}  // namespace fa2
