#pragma once
// Numerics for kernels that the compiler vectorizes: everything here is branch-free, so that loops over it
// become vector code for whichever instruction set the including file is compiled for (NRL_ISA).

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/base/dtype.h"
#include "core/tensor/tensor.h"

#define NRL_INLINE static inline __attribute__((always_inline))

namespace nrl::ops::NRL_ISA {

/// e^x within 1.5 ulp, subnormal results included; infinities and NaN as std::exp. The polynomial is the
/// minimax fit of (e^r - 1 - r) / r^2 on |r| <= ln(2)/2.
NRL_INLINE float exp_f32(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const float shifted = x * 1.44269504f + magic;
  const int32_t n = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(magic);
  const float nf = shifted - magic;
  const float r =
      (x - nf * 0.693359375f) + nf * 2.12194440e-4f;  // ln(2) in two parts, the first exact times n
  float q = 0.001392617612f;
  q = q * r + 0.008363173075f;
  q = q * r + 0.04166655466f;
  q = q * r + 0.1666657703f;
  q = q * r + 0.5f;
  const float y = (q * (r * r) + r) + 1.0f;
  // 2^n as two factors, because n runs from -150 to 128.
  const int32_t half = n >> 1;
  return y * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((n - half + 127) << 23);
}

/// erf(x) within 2 ulp; minimax fits of erf(x)/x in x^2 below 0.9 and of log(erfc(x)) above.
NRL_INLINE float erf_f32(float x) {
  const float a = std::fabs(x);
  const float z = x * x;
  float p = 8.529042254e-5f;
  p = p * z - 0.0008179552031f;
  p = p * z + 0.005204220038f;
  p = p * z - 0.02686066227f;
  p = p * z + 0.1128371801f;
  p = p * z - 0.3761263519f;
  p = p * z + 0.128379167f;  // the 1 of 1.128... is added exactly below
  const float t = a > 4.0f ? 4.0f : a;
  float l = 1.643063656e-6f;
  l = l * t - 4.616385863e-5f;
  l = l * t + 0.0005975857702f;
  l = l * t - 0.004762625833f;
  l = l * t + 0.02642763715f;
  l = l * t - 0.1100871665f;
  l = l * t - 0.6318239181f;
  l = l * t - 1.130231055f;
  l = l * t + 0.0003185396624f;
  const float large = std::copysign(1.0f - exp_f32(l), x);
  return a < 0.9f ? x * p + x : large;
}

/// Writes one element with a single rounding. The same value as bf16(float) and f16(float); loops that assign
/// a whole object are not vectorized, loops that assign its bits are.
NRL_INLINE void store(float& where, float value) {
  where = value;
}
NRL_INLINE void store(bf16& where, float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, quiet_nan = (u >> 16) | 0x40u;
  where.bits = static_cast<uint16_t>(value != value ? quiet_nan : rounded);
}
NRL_INLINE void store(f16& where, float value) {
  where.bits = f16::round(value);
}

/// Mathematics of the element-wise bodies (element.h) on the CPU.
struct SimdMath {
  NRL_INLINE float exp(float x) { return exp_f32(x); }
  NRL_INLINE float erf(float x) { return erf_f32(x); }
  NRL_INLINE float sqrt(float x) { return std::sqrt(x); }
  NRL_INLINE float reciprocal(float x) { return 1.0f / x; }
};

/// The elements of a tensor without the checked accessor: the dispatch function has checked it.
template <class T>
NRL_INLINE T* data_of(const Tensor& t) {
  return static_cast<T*>(t.data);
}

/// Calls body.operator()<T>() with an element type of f32 or bf16.
template <class Body>
NRL_INLINE void for_f32_or_bf16(DType dtype, const Body& body) {
  if (dtype == DType::bf16) {
    body.template operator()<bf16>();
  } else {
    body.template operator()<float>();
  }
}
/// The same for the element type of an activation tensor: f32, bf16 or f16.
template <class Body>
NRL_INLINE void for_float_type(DType dtype, const Body& body) {
  if (dtype == DType::f16) {
    body.template operator()<f16>();
  } else {
    for_f32_or_bf16(dtype, body);
  }
}
/// Calls body.operator()<T, W>() for two tensors: f16 comes with f16 only (are_float_pair()).
template <class Body>
NRL_INLINE void for_float_pair(DType first, DType second, const Body& body) {
  if (first == DType::f16) {
    body.template operator()<f16, f16>();
  } else {
    for_f32_or_bf16(first, [&]<class T>() {
      for_f32_or_bf16(second, [&]<class W>() { body.template operator()<T, W>(); });
    });
  }
}

}  // namespace nrl::ops::NRL_ISA
