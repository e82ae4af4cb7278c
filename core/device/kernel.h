#pragma once
// The one header that kernel files (*.cu) include besides the contracts of their ops. nvcc compiles them for
// the GPU; tests compile the same files with the host compiler and NRL_GPU=sim to run on fibers (tests/sim).
//
// Kernels use CUDA's spelling plus: NRL_LAUNCH((kernel<T>), grid, block, shared_bytes, stream,
// arguments...), NRL_RESIDENT((kernel<T>), threads), NRL_SHARED(float, name, [32]), NRL_DYN_SHARED(float,
// name). They use only what fiber.h models: no clusters, cooperative groups, cub, fences; wgmma and TMA only
// by core/ops/shared/gpu/hopper.cuh. Launchers live in namespace nrl::ops::NRL_GPU, `cuda` or `sim`.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/base/dtype.h"

#if defined(__CUDACC__)
#include <cstdio>

namespace nrl::device {
/// Fails (Exit::internal) naming the kernel when the launch was refused.
void check_launch(const char* kernel);
/// Asks for a kernel's dynamic shared memory where that is needed (core/base/shared_memory.h), once per
/// kernel. Any thread may call these two.
void allow_shared_memory(const void* kernel, size_t bytes);
/// Blocks of a kernel that a multiprocessor of this device runs at a time; at least 1. Asked once per kernel
/// and number of threads.
int resident_blocks(const void* kernel, int threads);
}  // namespace nrl::device

#define NRL_LAUNCH(kernel, grid, block, smem, stream, ...)                           \
  do {                                                                               \
    ::nrl::device::allow_shared_memory(reinterpret_cast<const void*>(kernel), smem); \
    kernel<<<grid, block, smem, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__);   \
    ::nrl::device::check_launch(#kernel);                                            \
  } while (0)
/// Blocks of a kernel without dynamic shared memory that a multiprocessor runs at a time.
#define NRL_RESIDENT(kernel, threads) \
  ::nrl::device::resident_blocks(reinterpret_cast<const void*>(kernel), threads)
#define NRL_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
#define NRL_DYN_SHARED(type, name)                                   \
  extern __shared__ __align__(128) unsigned char nrl_dyn_smem_raw[]; \
  type* name = reinterpret_cast<type*>(nrl_dyn_smem_raw)

#define NRL_MMA(types)                                                      \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." types               \
               ".f32 "                                                      \
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"         \
               : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[n][0]), "r"(b[n][1]))
/// d[n] += a b[n] for N tiles that share the 16 x 16 operand, which PTX does one by one. T: bf16 or f16.
template <class T, int N>
__device__ __forceinline__ void nrl_mma_m16n8k16(float (*d)[4], const unsigned* a, const unsigned (*b)[2]) {
  static_assert(std::is_same_v<T, nrl::bf16> || std::is_same_v<T, nrl::f16>);
#pragma unroll
  for (int n = 0; n < N; ++n)
    if constexpr (std::is_same_v<T, nrl::f16>) {
      NRL_MMA("f16.f16");
    } else {
      NRL_MMA("bf16.bf16");
    }
}
#undef NRL_MMA
#define NRL_MMA_FP8(types)                                                  \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." types               \
               ".f32 "                                                      \
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"         \
               : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[n][0]), "r"(b[n][1]))
/// The same of 16 x 32 FP8 operands. A and B are types of one number (8 bits, which convert to float) whose
/// `format` is e4m3 or e5m2. Needs compute capability 8.9; below it stops the kernel.
template <class A, class B, int N>
__device__ __forceinline__ void nrl_mma_m16n8k32(float (*d)[4], const unsigned* a, const unsigned (*b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  __trap();
#else
  constexpr bool a_e4m3 = A::format == nrl::DType::e4m3, b_e4m3 = B::format == nrl::DType::e4m3;
  static_assert((a_e4m3 || A::format == nrl::DType::e5m2) && (b_e4m3 || B::format == nrl::DType::e5m2));
#pragma unroll
  for (int n = 0; n < N; ++n)
    if constexpr (a_e4m3 && b_e4m3) {
      NRL_MMA_FP8("e4m3.e4m3");
    } else if constexpr (a_e4m3) {
      NRL_MMA_FP8("e4m3.e5m2");
    } else if constexpr (b_e4m3) {
      NRL_MMA_FP8("e5m2.e4m3");
    } else {
      NRL_MMA_FP8("e5m2.e5m2");
    }
#endif
}
#undef NRL_MMA_FP8
/// Four 8 x 8 matrices of 2-byte elements; lane 8 i + r gives the address of row r of matrix i, 16 bytes of
/// shared memory, `offset` bytes behind `base`: what the lanes have in common is not computed by each. f[i]
/// are elements (l / 4, 2 (l % 4)) and the one right of it, of the transpose if asked.
template <bool Transposed>
__device__ __forceinline__ void nrl_ldmatrix_x4(unsigned* f, const void* base, int offset) {
  const unsigned address =
      static_cast<unsigned>(__cvta_generic_to_shared(base)) + static_cast<unsigned>(offset);
  if constexpr (Transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(address)
                 : "memory");
  }
}
/// Copies 16 bytes to shared memory, zeros when not `real`: then `src` is not read. Both are aligned to 16.
__device__ __forceinline__ void nrl_cp_async16(void* dst, const void* src, bool real = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(dst))),
               "l"(src), "r"(real ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void nrl_cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void nrl_cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
/// 2^x within 2 units in the last place; 0 for results below the normal numbers.
__device__ __forceinline__ float nrl_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// 1 / x within 1 unit in the last place; 0 for results below the normal numbers.
__device__ __forceinline__ float nrl_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// `x`, of which the compiler knows nothing: what is computed from it is computed again after each call
/// instead of being kept in registers through a loop.
__device__ __forceinline__ int nrl_opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
/// Publishes to other blocks what this thread wrote, and what its block wrote before a barrier.
__device__ __forceinline__ void nrl_signal(unsigned* flag, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
/// How long a block waits for another one, in nanoseconds: a hundred times what the longest grid takes.
inline constexpr unsigned long long nrl_longest_wait_ns = 5'000'000'000;
__device__ __forceinline__ unsigned nrl_acquire(const unsigned* flag) {
  unsigned seen;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  return seen;
}
/// Not inlined: the arguments of printf would take registers of the kernel.
inline __device__ __noinline__ void nrl_report_wait(const char* waited_for) {
  printf("nrl-train: a kernel waited 5 s for %s, which did not come. The kernel stops here.\n", waited_for);
}
/// Waits until another block has signalled `value`. That block must have been running before this one could
/// ask (it took a smaller ticket from a counter). After nrl_longest_wait_ns the kernel says what it
/// waited for and stops with a trap, which the host sees as an error of the stream: a wait without end would
/// keep the GPU until it is reset. The wait sleeps between looks, so that it takes no bandwidth from the
/// block that it waits for.
__device__ __forceinline__ void nrl_wait_for_signal(const unsigned* flag, unsigned value,
                                                    const char* waited_for) {
  if (nrl_acquire(flag) == value) return;
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(64);
    if (nrl_acquire(flag) == value) return;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nrl_longest_wait_ns);
  nrl_report_wait(waited_for);
  __trap();
}

// The host compiler's twins of these are in fiber.h.
#define NRL_SITE_PARAMETER
#define NRL_SITE_ARGUMENT
#define NRL_CHECK_ALIGNED(p, bytes) static_cast<void>(0)

#else
#include NRL_SIMULATED_CUDA  // CUDA's names on the host; the build of the simulator sets it
#endif

namespace nrl::kernel {

inline constexpr int warp = 32;
inline constexpr unsigned all_lanes = 0xffffffffu;

/// Elements of T in 16 bytes, the widest global memory access.
template <class T>
inline constexpr int per_pack = 16 / sizeof(T);

/// True when `p` is aligned for a Pack of 16 bytes.
inline bool aligned16(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

/// Two floats rounded to bf16, `low` in the lower half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
#if defined(__CUDACC__)
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  return bf16(low).bits | (static_cast<unsigned>(bf16(high).bits) << 16);
#endif
}

/// The same in f16; beyond 65504 they become infinite.
__device__ __forceinline__ unsigned pack_f16(float low, float high) {
#if defined(__CUDACC__)
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  return f16(low).bits | (static_cast<unsigned>(f16(high).bits) << 16);
#endif
}
/// The same in T.
template <class T>
__device__ __forceinline__ unsigned pack_low(float low, float high) {
  static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, f16>);
  if constexpr (std::is_same_v<T, f16>) return pack_f16(low, high);
  return pack_bf16(low, high);
}
__device__ __forceinline__ float2 unpack_f16(unsigned both) {
  float2 v;
#if defined(__CUDACC__)
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(both));
#else
  f16 low, high;
  low.bits = static_cast<uint16_t>(both);
  high.bits = static_cast<uint16_t>(both >> 16);
  v.x = low, v.y = high;
#endif
  return v;
}

/// N consecutive elements of T in registers, zero at first: the vectorized load and store of all kernels.
/// N is 1, or such that they take 8 bytes or a multiple of 16; the access width follows from it. Arithmetic
/// is on floats: get() converts f32, bf16 or f16 elements, set() rounds them once.
template <class T, int N = per_pack<T>>
struct Pack {
  static constexpr int bytes = N * static_cast<int>(sizeof(T));
  static_assert(N == 1 || bytes == 8 || bytes % 16 == 0);
  /// What one access moves.
  using Word = std::conditional_t<N == 1, T, std::conditional_t<bytes == 8, uint2, uint4>>;
  static constexpr int words = bytes / static_cast<int>(sizeof(Word));

  Word raw[words] = {};

  /// `p` must be aligned to the access width; the simulated device checks that.
  __device__ __forceinline__ void load(const T* p NRL_SITE_PARAMETER) {
    if constexpr (N > 1) NRL_CHECK_ALIGNED(p, sizeof(Word));
#pragma unroll
    for (int w = 0; w < words; ++w) raw[w] = reinterpret_cast<const Word*>(p)[w];
  }
  __device__ __forceinline__ void store(T* p NRL_SITE_PARAMETER) const {
    if constexpr (N > 1) NRL_CHECK_ALIGNED(p, sizeof(Word));
#pragma unroll
    for (int w = 0; w < words; ++w) reinterpret_cast<Word*>(p)[w] = raw[w];
  }
  __device__ __forceinline__ void get(float (&v)[N]) const {
    if constexpr (N == 1) {
      v[0] = static_cast<float>(raw[0]);
    } else if constexpr (std::is_same_v<T, float>) {
      memcpy(v, raw, sizeof v);
    } else {
      static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, f16>);
      unsigned pairs[N / 2];
      memcpy(pairs, raw, sizeof pairs);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        if constexpr (std::is_same_v<T, f16>) {
          const float2 pair = unpack_f16(pairs[i]);
          v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
          continue;
        }
        v[2 * i] = __uint_as_float(pairs[i] << 16);
        v[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
      }
    }
  }
  __device__ __forceinline__ void set(const float (&v)[N]) {
    if constexpr (N == 1) {
      raw[0] = T(v[0]);
    } else if constexpr (std::is_same_v<T, float>) {
      memcpy(raw, v, sizeof v);
    } else {
      unsigned pairs[N / 2];
#pragma unroll
      for (int i = 0; i < N / 2; ++i) pairs[i] = pack_low<T>(v[2 * i], v[2 * i + 1]);
      memcpy(raw, pairs, sizeof pairs);
    }
  }
};

/// N elements of memory as floats, and back; alignment as for a Pack.
template <class T, int N>
__device__ __forceinline__ void load_floats(const T* p, float (&v)[N] NRL_SITE_PARAMETER) {
  Pack<T, N> pack;
  pack.load(p NRL_SITE_ARGUMENT);
  pack.get(v);
}
template <class T, int N>
__device__ __forceinline__ void store_floats(T* p, const float (&v)[N] NRL_SITE_PARAMETER) {
  Pack<T, N> pack;
  pack.set(v);
  pack.store(p NRL_SITE_ARGUMENT);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = warp / 2; o; o >>= 1) v += __shfl_xor_sync(all_lanes, v, o);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = warp / 2; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(all_lanes, v, o));
  return v;
}

/// Sum over the block, the same value in all threads. Every thread must call it; blockDim.x is a multiple of
/// 32, the block is one-dimensional.
__device__ __forceinline__ float block_sum(float v) {
  NRL_SHARED(float, part, [32]);
  const int lane = threadIdx.x % warp, w = threadIdx.x / warp, warps = blockDim.x / warp;
  v = warp_sum(v);
  if (lane == 0) part[w] = v;
  __syncthreads();
  v = warp_sum(lane < warps ? part[lane] : 0.0f);
  __syncthreads();
  return v;
}
__device__ __forceinline__ float block_max(float v) {
  NRL_SHARED(float, part, [32]);
  const int lane = threadIdx.x % warp, w = threadIdx.x / warp, warps = blockDim.x / warp;
  v = warp_max(v);
  if (lane == 0) part[w] = v;
  __syncthreads();
  v = warp_max(lane < warps ? part[lane] : -INFINITY);
  __syncthreads();
  return v;
}

/// The normal distribution at x: its cumulative distribution function and exp(-x^2 / 2). Neither is a product
/// that the compiler could contract with a sum, or the bits of a gradient would depend on what else its
/// kernel computes.
struct Normal {
  float cdf, exponential;
};

/// Mathematics of the element-wise bodies (core/ops/shared/element.h) on the GPU.
struct GpuMath {
  static __device__ __forceinline__ float exp(float x) { return __expf(x); }
  static __device__ __forceinline__ float erf(float x) { return erff(x); }
  static __device__ __forceinline__ float sqrt(float x) { return sqrtf(x); }
  /// Within 2 units in the last place; 0 for results below the normal numbers.
  static __device__ __forceinline__ float reciprocal(float x) { return __fdividef(1.0f, x); }
  /// cdf(-|x|) = exp(-x^2 / 2) t P(t) with t = 1 / (1 + 0.375 |x|), the form of Abramowitz & Stegun 7.1.26
  /// with P fitted for a relative error of at most 3e-5, which is small beside the rounding to 16 bits. It
  /// takes half the instructions of erff.
  static __device__ __forceinline__ Normal normal(float x) {
    const float exponential = nrl_exp2(x * x * -0.72134752f);  // -log2(e) / 2
    const float t = nrl_reciprocal(__fmaf_rn(0.375f, fabsf(x), 1.0f));
    float p = __fmaf_rn(-0.0913668051f, t, 0.201886788f);
    p = __fmaf_rn(p, t, 0.0823231637f);
    p = __fmaf_rn(p, t, 0.158125252f);
    p = __fmaf_rn(p, t, 0.149019107f);
    const float tail = __fmul_rn(p * t, exponential);
    return {x < 0.0f ? tail : 1.0f - tail, exponential};
  }
};

/// Blocks for `work` units of `per_block` each.
inline unsigned blocks_for(int64_t work, int64_t per_block) {
  return work > 0 ? static_cast<unsigned>((work + per_block - 1) / per_block) : 1;
}
/// The same, at most `resident` per multiprocessor.
inline unsigned grid_for(int64_t work, int64_t per_block, int multiprocessors, int resident = 8) {
  const int64_t most = static_cast<int64_t>(multiprocessors) * resident;
  return blocks_for(work < per_block * most ? work : per_block * most, per_block);
}

}  // namespace nrl::kernel
