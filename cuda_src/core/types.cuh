// Scalar types. The sources include nothing but each other, so that NVRTC needs no CUDA headers on the user's
// machine; the little that <cstdint> and <cuda_fp16.h> would bring is spelled here.
#pragma once

namespace fa2 {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// One stored 16-bit element. No arithmetic is defined on these: tensor cores read them, and ptx.cuh converts from
// float, one instruction per pair.
struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};

// What cuTensorMapEncodeTiled of the CUDA driver writes, a field of argument structs: an array's address, sizes and
// strides, and the box that a copy takes.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
constexpr float kLowest = -3.40282347e38f;     // the lowest finite float
constexpr float kLn2 = 0.693147180559945309f;  // the softmax works in base 2, scores and `lse` are natural
constexpr float kLog2E = 1.44269504088896341f;
constexpr int kWarpSize = 32;

template <class A, class B>
inline constexpr bool kSame = false;
template <class A>
inline constexpr bool kSame<A, A> = true;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int min(int a, int b) { return a < b ? a : b; }
constexpr u32 min(u32 a, u32 b) { return a < b ? a : b; }
constexpr int max(int a, int b) { return a < b ? b : a; }

}  // namespace fa2
