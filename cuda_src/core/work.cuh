// From the block's number to its piece of work: one tile of query rows of one head of one batch element.
#pragma once

#include "core/types.cuh"
#include "params.cuh"

namespace fa2 {

struct WorkItem {
  int batch, head, head_k;
  int row_begin;  // first query row of the tile

  // Blocks of one head are neighbours, so that they find its keys and values in L2, and so are the heads that share
  // them. The hardware starts blocks in order: where `kLastRowsFirst`, the tiles that see most keys start first, and no
  // long tile is left to run alone at the end.
  template <int kBlockM, bool kLastRowsFirst>
  static WorkItem from_block(const FwdParams& params) {
    const u32 block = blockIdx.x;
    const u32 num_m_blocks = params.num_m_blocks;
    const u32 head_of_batch = block / num_m_blocks;
    const int m_block = static_cast<int>(block - head_of_batch * num_m_blocks);
    const int batch = static_cast<int>(head_of_batch / params.num_heads);
    const int head = static_cast<int>(head_of_batch - batch * params.num_heads);
    const int tile = kLastRowsFirst ? static_cast<int>(num_m_blocks) - 1 - m_block : m_block;
    return {batch, head, static_cast<int>(head / params.heads_per_kv), tile * kBlockM};
  }
};

}  // namespace fa2
