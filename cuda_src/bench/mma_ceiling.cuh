// How fast mma.sync goes where nothing else happens: the ceiling that attention is measured against.
#pragma once

#include "core/ptx.cuh"
#include "params.cuh"

namespace fa2 {

template <class T>
struct MmaCeiling {
  // Two A operands meet four B operands, as in a small matrix product: eight independent accumulators, so that a warp
  // always has an mma ready while the previous ones are still in the pipeline.
  static constexpr int kA = 2;
  static constexpr int kB = 4;

  static void run(const CeilingParams& params) {
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    u32 state = thread;
    u32 a[kA][4], b[kB][2];
    for (auto& piece : a)
      for (u32& word : piece) word = operand(state);
    for (auto& piece : b)
      for (u32& word : piece) word = operand(state);
    float sums[kA][kB][4] = {};
#pragma unroll 4
    for (int i = 0; i < params.iterations; ++i)
#pragma unroll
      for (int m = 0; m < kA; ++m)
#pragma unroll
        for (int n = 0; n < kB; ++n) ptx::mma_m16n8k16<T>(sums[m][n], a[m], b[n][0], b[n][1]);
    float total = 0.f;
    for (const auto& row : sums)
      for (const auto& piece : row)
        for (float value : piece) total += value;
    reinterpret_cast<float*>(params.sink)[thread] = total;  // stored, or the compiler would remove the work
  }

 private:
  // Two pseudo-random elements in [-1, 1). Zeros would toggle no wires, draw less power and clock higher than any real
  // product.
  static u32 operand(u32& state) {
    const float low = uniform(state);
    return ptx::pack<T>(low, uniform(state));
  }
  static float uniform(u32& state) {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int>(state)) * 4.656612873e-10f;
  }
};

}  // namespace fa2
