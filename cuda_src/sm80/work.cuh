// From the block's number to its piece of work: one tile of query rows of one head of one batch element.
#pragma once

#include "core/types.cuh"
#include "params.cuh"

namespace fa2 {

struct WorkItem {
  int batch, head, head_k;
  int first_row;  // of the tile of query rows

  // The hardware starts blocks in order. Heads come in groups, as many as find their keys and values in L2 together
  // (heads_per_group of the plan), and a group's heads take turns, tile by tile. Where `kLastRowsFirst`, the tiles that
  // see most keys start first, so that the last ones to run are short ones of many heads, and no long tile is left to
  // run alone.
  template <int kBlockM, bool kLastRowsFirst>
  static WorkItem from_block(const FwdParams& params) {
    const u32 group = blockIdx.x / params.blocks_per_group;
    const u32 block = blockIdx.x - group * params.blocks_per_group;
    const u32 first_head = group * params.heads_per_group;
    const u32 heads = min(params.heads_per_group, params.batch * params.num_heads - first_head);
    const int m_block = static_cast<int>(block / heads);
    const u32 head_of_batch = first_head + block % heads;
    const int batch = static_cast<int>(head_of_batch / params.num_heads);
    const int head = static_cast<int>(head_of_batch - batch * params.num_heads);
    const int tile = kLastRowsFirst ? static_cast<int>(params.num_m_blocks) - 1 - m_block : m_block;
    return {batch, head, static_cast<int>(head / params.heads_per_kv), tile * kBlockM};
  }
};

}  // namespace fa2
