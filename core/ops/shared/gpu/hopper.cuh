#pragma once
// PTX of compute capability 9.0 that the simulator does not model: mbarriers, tensor maps (TMA) and GEMMs of
// warpgroups. In parentheses: sections of the PTX ISA. Code that uses it must be compiled for sm_90a.

#include "core/device/kernel.h"

#if defined(__CUDACC__)

#include <cuda.h>

namespace nrl::kernel {

inline constexpr int warpgroup = 128;  ///< threads

/// Address within the block's shared memory.
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// --- mbarriers ("mbarrier") --------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialized mbarriers visible to TMA ("membar, fence").
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives; the phase also needs `bytes` from TMA.
__device__ __forceinline__ void mbarrier_arrive_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
/// Waits for the end of the phase of `parity`. After nrl_longest_wait_ns the kernel stops with a trap, as in
/// nrl_wait_for_signal, but in silence: with a call of printf anywhere in a kernel ptxas lets each wgmma wait
/// for the one before, and spills.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  if (mbarrier_try_wait(barrier, parity)) return;
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    if (mbarrier_try_wait(barrier, parity)) return;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nrl_longest_wait_ns);
  if (!mbarrier_try_wait(barrier, parity)) __trap();  // it may have been switched out before it read the time
}

// --- TMA ("cp.async.bulk.tensor") --------------------------------------------------------------------------

/// Copies the box at (c0, c1, c2), innermost first, to shared memory; elements beyond the tensor are zeros
/// and count as bytes of the mbarrier as well.
__device__ __forceinline__ void tma_load(unsigned to, const CUtensorMap* map, unsigned barrier, int c0,
                                         int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
/// Copies `bytes` contiguous ones, a multiple of 16, between addresses that are multiples of 16
/// ("cp.async.bulk").
__device__ __forceinline__ void bulk_load(unsigned to, const void* from, int bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
/// Fetches a tensor map before it is needed ("prefetch").
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/// Orders this thread's accesses to shared memory before later ones by TMA and wgmma ("Async Proxy").
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- warpgroups --------------------------------------------------------------------------------------------

/// Registers per thread from here on ("setmaxnreg"); all warps of the warpgroup must call it.
template <int registers>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
/// Barrier `id` of `threads`, of which some only arrive ("bar, barrier").
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- wgmma ("Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions") ------------------------

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `pending` committed groups are unfinished.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
/// Keeps the compiler from moving accesses to sums across this point.
template <int n>
__device__ __forceinline__ void wgmma_pin(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Descriptor of an operand of 16-bit elements in shared memory with 128-byte swizzle ("Matrix Descriptor
/// Format"): blocks of 64 contiguous elements (lines of 128 bytes) in which line l has its 16-byte unit u at
/// u ^ (l % 8).
///
///   K-major   a line is a row (of m or n) with 64 of k. 8 lines, 1024 bytes, are the stride offset.
///   MN-major  a line has 64 of m or n for one k. 8 lines are the stride offset; the next 64 of m or n follow
///             after 64 lines, 8192 bytes, the leading offset.
///
/// `address` must begin a block or, K-major, a multiple of 8 lines.
template <bool mn_major>
__device__ __forceinline__ uint64_t wgmma_descriptor(unsigned address) {
  constexpr uint64_t leading = mn_major ? 8192 : 16, stride = 1024, swizzle_128 = 1;
  return uint64_t{(address & 0x3ffff) >> 4} | leading >> 4 << 16 | stride >> 4 << 32 | swizzle_128 << 62;
}
/// Added to a descriptor for each 16 of k.
template <bool mn_major>
inline constexpr uint64_t wgmma_k_step = (mn_major ? 2048 : 32) >> 4;

// clang-format off
#define NRL_SUMS(f, i) f(d[i]), f(d[i + 1]), f(d[i + 2]), f(d[i + 3]), f(d[i + 4]), f(d[i + 5]), f(d[i + 6]), \
                       f(d[i + 7])
#define NRL_WGMMA(f, begin, end, ...)                                                                           \
  asm volatile(begin "{"                                                                                     \
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                     \
               "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                           \
               "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                           \
               "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"                           \
               "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"                           \
               "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"                            \
               "}, %96, %97, " end                                                                           \
               : NRL_SUMS(f, 0), NRL_SUMS(f, 8), NRL_SUMS(f, 16), NRL_SUMS(f, 24), NRL_SUMS(f, 32), NRL_SUMS(f, 40),          \
                 NRL_SUMS(f, 48), NRL_SUMS(f, 56), NRL_SUMS(f, 64), NRL_SUMS(f, 72), NRL_SUMS(f, 80), NRL_SUMS(f, 88)         \
               : "l"(a), "l"(b), __VA_ARGS__)
#define NRL_WGMMA_16(types) NRL_WGMMA("+f", "wgmma.mma_async.sync.aligned.m64n192k16.f32." types " ", \
                                      "1, 1, 1, %98, %99;", "n"(a_mn), "n"(b_mn))
#define NRL_WGMMA_8(f, types, add) NRL_WGMMA(f, "{.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"             \
                                     "wgmma.mma_async.sync.aligned.m64n192k32.f32." types " ", \
                                     "add, 1, 1;}", "n"(add))
// clang-format on
/// Starts d (64 x 192) += a b over 16 of k ("wgmma.mma_async"). T: bf16 or f16. Thread t has columns
/// 8 j + t % 4 * 2 + {0, 1}: of row r = t / 32 * 16 + t % 32 / 4 in d[4 j + {0, 1}], and of row r + 8 in
/// d[4 j + {2, 3}].
template <class T, bool a_mn, bool b_mn>
__device__ __forceinline__ void wgmma_m64n192k16(float (&d)[96], uint64_t a, uint64_t b) {
  static_assert(std::is_same_v<T, nrl::bf16> || std::is_same_v<T, nrl::f16>);
  if constexpr (std::is_same_v<T, nrl::f16>) {
    NRL_WGMMA_16("f16.f16");
  } else {
    NRL_WGMMA_16("bf16.bf16");
  }
}
/// Starts d (64 x 192) = a b, or += with `add`, over 32 of k of K-major FP8 operands, whose lines in the
/// descriptor have 128 of k. b is e4m3, and a e5m2 or e4m3. Sums are as of wgmma_m64n192k16.
template <bool a_e5m2, bool add>
__device__ __forceinline__ void wgmma_m64n192k32(float (&d)[96], uint64_t a, uint64_t b) {
  if constexpr (a_e5m2 && add) {
    NRL_WGMMA_8("+f", "e5m2.e4m3", 1);
  } else if constexpr (a_e5m2) {
    NRL_WGMMA_8("=f", "e5m2.e4m3", 0);
  } else if constexpr (add) {
    NRL_WGMMA_8("+f", "e4m3.e4m3", 1);
  } else {
    NRL_WGMMA_8("=f", "e4m3.e4m3", 0);
  }
}
#undef NRL_WGMMA_8
#undef NRL_WGMMA_16
#undef NRL_WGMMA
#undef NRL_SUMS

/// Adds four neighboring floats, aligned to 16 bytes, in the L2 cache ("red"). Numbers below the normal ones
/// count as 0.
__device__ __forceinline__ void reduce_add4(float* to, float4 v) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}

}  // namespace nrl::kernel

#endif
