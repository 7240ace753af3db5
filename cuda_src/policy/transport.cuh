// How tiles come from global into shared memory, whatever the storage that they come from.
//
// A transport says which of a storage's sources it wants, and names a stream. That keeps pairs of tiles coming, one
// ahead of the arithmetic: two tiles of the same rows, from any two sources. In a forward kernel they are K and V of
// some keys. All threads make these calls, in this order:
//
//   start(n, left)           once, after Q's copies have been committed as a group of their own
//   acquire_first(n, left)   the first tile may be read: first_offset() is its place behind the first buffer
//   release_first(n, left)   this warp has read it
//   acquire_second()         the second tile may be read, at second_offset()
//   release_second()         this warp has read it
//
// `n` is the number of the current pair, the next one is Tiles::kStep further, and `left` pairs are to be computed,
// this one included. Which copies start where is the stream's own business. Tiles says what they are: First and Second,
// how many buffers there are of each (kStages), and how many threads copy (kThreads).
#pragma once

#include "core/copy_stream.cuh"
#include "core/tensor_stream.cuh"

namespace fa2 {

// By cp.async of all threads: any strides, every architecture.
struct ThreadCopies {
  template <class Storage>
  using Source = typename Storage::Rows;
  template <class Tiles, class... Sources>
  using Stream = CopyStream<Tiles, Sources...>;
};

// By the copy engine, through tensor maps: sm_90 and later.
struct TensorCopies {
  template <class Storage>
  using Source = typename Storage::Boxes;
  template <class Tiles, class... Sources>
  using Stream = TensorStream<Tiles, Sources...>;
};

}  // namespace fa2
