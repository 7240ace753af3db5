// One instruction, one function. Everything else in the kernels is plain C++; this file is the whole list of what
// we ask of the hardware by name. Names and operand order follow the PTX ISA.
//
// `volatile` marks what must keep its order against barriers and waits (memory); arithmetic is left free to move.
#pragma once

#include "core/types.cuh"

namespace fa2::ptx {

// ---- shared memory addresses ------------------------------------------------------------------------------------

// The 32-bit shared-window address of a generic pointer.
inline u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// ---- asynchronous copies, global -> shared ------------------------------------------------------------------------

// Copies 16 bytes past L1 (.cg), of which the first `src_bytes` come from global memory and the rest are zeros.
// With src_bytes = 0 nothing is read, so `global` may then point anywhere.
inline void cp_async_16(u32 shared, const void* global, int src_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(src_bytes)
               : "memory");
}

inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are still in flight. Other threads' copies are not covered: a
// barrier has to follow before their bytes are read.
template <int kPending>
inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders the memory accesses of a warp's lanes.
inline void warp_barrier() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// Orders those of all threads of the block.
inline void barrier() { asm volatile("bar.sync 0;" ::: "memory"); }

// Barriers of part of the block: `barrier` is 1 to 15, and kThreads, whole warps, take part. Each orders the memory
// accesses of those that arrive before those of the threads that wait.
template <int kThreads>
inline void barrier_sync(u32 barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Arrives without waiting.
template <int kThreads>
inline void barrier_arrive(u32 barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Waits, and tells whether `predicate` was true on any thread.
template <int kThreads>
inline bool barrier_any(u32 barrier, bool predicate) {
  u32 result;
  asm volatile("{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n bar.red.or.pred q, %2, %3, p;\n selp.u32 %0, 1, 0, q;\n}"
               : "=r"(result)
               : "r"(static_cast<u32>(predicate)), "r"(barrier), "n"(kThreads)
               : "memory");
  return result != 0;
}

// ---- bulk tensor copies, global -> shared, and the barriers that count them (sm_90) --------------------------------

// Makes a barrier in shared memory that completes a phase after `arrivals` arrivals.
inline void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine, which does not see ordinary writes by itself.
inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

inline void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more bytes of bulk copies.
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity (phases alternate, beginning with 0) is complete. What arrived threads and
// counted copies wrote is then visible.
inline void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared.b64 complete, [%0], %1;\n"
      "@!complete bra again_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// One thread copies the box at (dim, key, head, batch) of the array that `map` describes, zeros where the box reaches
// past the array; `barrier` counts its bytes.
inline void copy_tensor_4d(u32 shared, const void* map, int dim, int key, int head, int batch, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared),
      "l"(map), "r"(dim), "r"(key), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}

// ---- matrix fragments -----------------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8, and receives of matrix
// i, in r[i], the two elements of row l / 4 at columns 2 (l % 4) and 2 (l % 4) + 1.
inline void ldmatrix_x4(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

// The same, each matrix transposed on the way: the elements of rows 2 (l % 4) and 2 (l % 4) + 1 at column l / 4.
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

// d += a b on the tensor cores: a is 16 x 16 (row major), b 16 x 8 (column major), d 16 x 8 in float32.
template <class T>
inline void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kSame<T, f16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(kSame<T, bf16>, "the tensor cores take f16 or bf16 here");
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---- conversions and special functions ------------------------------------------------------------------------------

// Two floats rounded to nearest even and packed, `low` in the low half. (The instruction takes the high half first.)
template <class T>
inline u32 pack(float low, float high) {
  u32 packed;
  if constexpr (kSame<T, f16>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    static_assert(kSame<T, bf16>, "pack makes f16 or bf16");
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// Rounded to T and back.
template <class T>
inline float rounded(float x) {
  float y;
  if constexpr (kSame<T, f16>) {
    asm("{\n.reg .b16 h;\ncvt.rn.f16.f32 h, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(y) : "f"(x));
  } else {
    y = __uint_as_float(pack<T>(0.f, x));  // a bfloat16 is the upper half of a float
  }
  return y;
}

// A packed pair's low or high half.
template <class T>
inline float unpack_low(u32 pair) {
  float y;
  if constexpr (kSame<T, f16>) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(y) : "r"(pair));
  } else {
    y = __uint_as_float(pair << 16);  // a bfloat16 is the upper half of a float
  }
  return y;
}
template <class T>
inline float unpack_high(u32 pair) {
  float y;
  if constexpr (kSame<T, f16>) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(y) : "r"(pair));
  } else {
    y = __uint_as_float(pair & 0xffff0000u);
  }
  return y;
}

// 2^x. Exact at integers; subnormal results flush to 0; exp2(-inf) = 0.
inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

inline float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Within 2^-11 of the true value, relatively.
inline float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// a b + c, rounded towards zero: what overflows becomes the largest finite number.
inline float fma_towards_zero(float a, float b, float c) {
  float y;
  asm("fma.rz.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}

inline float abs(float x) {
  float y;
  asm("abs.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two; a NaN operand is dropped, so a row maximum ignores NaN (its exponential does not).
inline float max(float a, float b) {
  float y;
  asm("max.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// ---- exchanges within a warp ----------------------------------------------------------------------------------------

constexpr u32 kAllLanes = 0xffffffffu;

// The value that lane (own lane ^ kMask) holds.
template <int kMask>
inline u32 shfl_xor(u32 value) {
  u32 other;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, %3;" : "=r"(other) : "r"(value), "n"(kMask), "n"(kAllLanes));
  return other;
}

template <int kMask>
inline float shfl_xor(float value) {
  return __uint_as_float(shfl_xor<kMask>(__float_as_uint(value)));
}

// True on every lane if `predicate` is true on any.
inline bool any(bool predicate) {
  u32 result;
  asm volatile("{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n vote.sync.any.pred q, p, %2;\n selp.u32 %0, 1, 0, q;\n}"
               : "=r"(result)
               : "r"(static_cast<u32>(predicate)), "n"(kAllLanes));
  return result != 0;
}

// ---- loads of what no thread writes, through the read-only path ----------------------------------------------------

inline u32 load_global_b8(const void* global) {
  u32 value;
  asm("ld.global.nc.u8 %0, [%1];" : "=r"(value) : "l"(global));
  return value;
}
inline u32 load_global_b16(const void* global) {
  u32 value;
  asm("ld.global.nc.u16 %0, [%1];" : "=r"(value) : "l"(global));
  return value;
}
inline u32 load_global_b32(const void* global) {
  u32 value;
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(global));
  return value;
}
inline float load_global_f32(const void* global) {
  float value;
  asm("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(global));
  return value;
}

struct FloatPair {
  float low, high;
};
inline FloatPair load_global_pair(const void* global) {
  FloatPair pair;
  asm("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(pair.low), "=f"(pair.high) : "l"(global));
  return pair;
}

// ---- loads and stores of shared memory, stores to global memory ----------------------------------------------------

inline void store_shared(u32 shared, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
inline void load_shared(u32 (&x)[4], u32 shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}

inline void store_global(void* global, u16 value) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(global), "h"(value) : "memory");
}
inline void store_global(void* global, u32 value) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}
inline void store_global(void* global, float value) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
}
inline void store_global(void* global, u32 a, u32 b) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(global), "r"(a), "r"(b) : "memory");
}
inline void store_global(void* global, float a, float b) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(global), "f"(a), "f"(b) : "memory");
}
inline void store_global(void* global, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

}  // namespace fa2::ptx
