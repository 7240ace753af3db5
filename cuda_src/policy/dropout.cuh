// Dropout of probabilities by counter-based random numbers: whether (batch, head, row, key) is kept is a function of
// those four and the seed alone, the same for any tile, direction, architecture, and in cupy_fa2/dropout.py.
//
// Philox-4x32 with 7 rounds: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. One call gives
// eight 16-bit numbers, laid over the columns that a lane holds of a row: of 32 keys, 8 n + 2 t and 8 n + 2 t + 1 for
// n = 0..3, with t = lane % 4. So no bit is computed twice, and none is thrown away.
#pragma once

#include "core/tile.cuh"
#include "params.cuh"

namespace fa2 {

struct NoDropout {
  static float rescale(const AttentionParams&) { return 1.f; }

  template <int kMTiles, int kChunks>
  struct Of {
    Of(const AttentionParams&, int, int) {}
    void draw(int, int) {}
    void drop(ScoreChunk<kMTiles>&, int) const {}
  };
};

struct PhiloxDropout {
  static constexpr int kKeysPerCall = 32;  // of one row, by the four lanes of a quad

  static float rescale(const AttentionParams& params) { return params.dropout_rescale; }

  template <int kMTiles, int kChunks>
  struct Of {
    static_assert(kChunks % 2 == 0, "a call's numbers are for two chunks");
    static constexpr int kRows = kMTiles * kRowsPerMTile;
    u32 key_low, key_high;
    u32 batch, head;
    u32 threshold;  // in the upper half: a number below it is kept
    u32 words[kChunks / 2][kRows][4];

    Of(const AttentionParams& params, int batch, int head)
        : batch(batch), head(head), threshold(params.dropout_threshold << 16) {
      const u64* array = reinterpret_cast<const u64*>(params.dropout_seed_array);
      const u64 seed = array != nullptr ? *array : params.dropout_seed;
      key_low = static_cast<u32>(seed);
      key_high = static_cast<u32>(seed >> 32);
    }

    // Draws for a warp's scores, which begin at a multiple of 32 keys. Before Q K^T, whose mma leave time for it.
    void draw(int first_row, int first_key) {
#pragma unroll
      for (int pair = 0; pair < kChunks / 2; ++pair) {
        const u32 column = (first_key / kKeysPerCall + pair) * 4 + lane_id() % 4;
#pragma unroll
        for (int r = 0; r < kRows; ++r) philox(words[pair][r], column, first_row + fragment_row(r));
      }
    }

    // Sets dropped probabilities of a chunk to 0: of the rows and keys that were drawn for.
    void drop(ScoreChunk<kMTiles>& p, int chunk) const {
      p.visit([&](float& value, int r, int col) {
        const u32 word = words[chunk / 2][r][chunk % 2 * 2 + col / 8];
        if ((col % 2 == 0 ? word << 16 : word) >= threshold) value = 0.f;
      });
    }

   private:
    void philox(u32 (&c)[4], u32 column, u32 row) const {
      c[0] = column, c[1] = row, c[2] = head, c[3] = batch;
      u32 k0 = key_low, k1 = key_high;
#pragma unroll
      for (int round = 0; round < 7; ++round) {
        const u64 product0 = static_cast<u64>(0xD2511F53u) * c[0];
        const u64 product1 = static_cast<u64>(0xCD9E8D57u) * c[2];
        c[0] = static_cast<u32>(product1 >> 32) ^ c[1] ^ k0;
        c[2] = static_cast<u32>(product0 >> 32) ^ c[3] ^ k1;
        c[1] = static_cast<u32>(product1);
        c[3] = static_cast<u32>(product0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
      }
    }
  };
};

}  // namespace fa2
