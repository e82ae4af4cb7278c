#pragma once
// CUDA's qualifiers, vector types, mathematics, memory and atomic functions for the host compiler. What needs
// the running block is in fiber.h.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __host__
#define __device__
#define __global__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// Sizes and alignments as CUDA's. Kernels access memory of any type through them.
struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz) {}
};
struct alignas(8) [[gnu::may_alias]] float2 {
  float x, y;
};
struct alignas(16) [[gnu::may_alias]] float4 {
  float x, y, z, w;
};
struct alignas(8) [[gnu::may_alias]] uint2 {
  unsigned x, y;
};
struct alignas(16) [[gnu::may_alias]] uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) [[gnu::may_alias]] int2 {
  int x, y;
};
struct alignas(16) [[gnu::may_alias]] int4 {
  int x, y, z, w;
};
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline int2 make_int2(int x, int y) {
  return {x, y};
}
inline int4 make_int4(int x, int y, int z, int w) {
  return {x, y, z, w};
}

// --- mathematics: exact to a rounding here, where the GPU's fast functions are not ---------------
using std::max;
using std::min;
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __exp10f(float x) {
  return std::pow(10.0f, x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __log2f(float x) {
  return std::log2(x);
}
inline float __sinf(float x) {
  return std::sin(x);
}
inline float __cosf(float x) {
  return std::cos(x);
}
inline float __powf(float x, float y) {
  return std::pow(x, y);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fsqrt_rn(float x) {
  return std::sqrt(x);
}
inline float __frsqrt_rn(float x) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline int __float2int_rn(float x) {
  return static_cast<int>(std::nearbyint(x));
}
inline float __uint_as_float(unsigned bits) {
  return std::bit_cast<float>(bits);
}
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline float __int_as_float(int bits) {
  return std::bit_cast<float>(bits);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __popcll(unsigned long long x) {
  return std::popcount(x);
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline int __ffs(int x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1;
}
/// Byte i of the result is the byte that digit i of `selector` (0 to 7) numbers, of x and then y.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = uint64_t{y} << 32 | x;
  unsigned out = 0;
  for (unsigned i = 0; i < 4; ++i)
    out |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
}
/// The larger of each half, unsigned.
inline unsigned __vmaxu2(unsigned x, unsigned y) {
  return std::max(x & 0xffff0000u, y & 0xffff0000u) | std::max(x & 0xffffu, y & 0xffffu);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((uint64_t{a} * b) >> 32);
}

// --- loads and stores with a hint to the caches --------------------------------------------------
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldlu(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, std::type_identity_t<T> v) {
  *p = v;
}
template <class T>
void __stcg(T* p, std::type_identity_t<T> v) {
  *p = v;
}

// --- atomics: relaxed, as CUDA's; each returns the old value -------------------------------------
namespace nrl::sim {
template <class T, class Update>
T atomic_update(T* p, const Update& update) {
  T old, wanted;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do {
    wanted = update(old);
  } while (!__atomic_compare_exchange(p, &old, &wanted, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
}  // namespace nrl::sim
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return nrl::sim::atomic_update(p, [v](T old) { return static_cast<T>(old + v); });
}
template <class T>
T atomicSub(T* p, std::type_identity_t<T> v) {
  return nrl::sim::atomic_update(p, [v](T old) { return static_cast<T>(old - v); });
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v) {
  static_assert(std::is_integral_v<T>);
  return nrl::sim::atomic_update(p, [v](T old) { return old < v ? v : old; });
}
template <class T>
T atomicMin(T* p, std::type_identity_t<T> v) {
  static_assert(std::is_integral_v<T>);
  return nrl::sim::atomic_update(p, [v](T old) { return v < old ? v : old; });
}
template <class T>
T atomicAnd(T* p, std::type_identity_t<T> v) {
  static_assert(std::is_integral_v<T>);
  return nrl::sim::atomic_update(p, [v](T old) { return old & v; });
}
template <class T>
T atomicOr(T* p, std::type_identity_t<T> v) {
  static_assert(std::is_integral_v<T>);
  return nrl::sim::atomic_update(p, [v](T old) { return old | v; });
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  return nrl::sim::atomic_update(p, [v](T) { return v; });
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  __atomic_compare_exchange(p, &expected, &v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
