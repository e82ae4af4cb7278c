#pragma once
// Numerics of the CPU's kernels, of a float in loops that the compiler vectorizes (everything here is
// branch-free) or of a vector (lanes.h): V is float or Lanes.

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/base/dtype.h"
#include "core/ops/shared/cpu/lanes.h"
#include "core/tensor/tensor.h"

namespace nrl::ops::NRL_ISA {

/// The bits of a float or of each of a vector.
NRL_INLINE int32_t bits_of(float x) {
  return std::bit_cast<int32_t>(x);
}
NRL_INLINE float from_bits(int32_t x) {
  return std::bit_cast<float>(x);
}
NRL_INLINE IntLanes bits_of(Lanes x) {
  return reinterpret_cast<IntLanes>(x);
}
NRL_INLINE Lanes from_bits(IntLanes x) {
  return reinterpret_cast<Lanes>(x);
}

/// x within [low, high], NaN as it is.
template <class V>
NRL_INLINE V clamp(V x, float low, float high) {
  x = x < low ? V{} + low : x;
  return x > high ? V{} + high : x;
}
/// Adding it rounds to an integer in the low bits: 1.5 * 2^23.
inline constexpr float rounding_magic = 12582912.0f;
/// x * 2^n, rounded once, for whole n from -150 to 128 and shifted = n + rounding_magic.
template <class V>
NRL_INLINE V scale_by_power(V x, V shifted) {
  const auto n = bits_of(shifted) - bits_of(rounding_magic), half = n >> 1;
  // Two factors, because 2^n itself may be out of range.
  return x * from_bits((half + 127) << 23) * from_bits((n - half + 127) << 23);
}
#if defined(NRL_ISA_avx512)
NRL_INLINE Lanes clamp(Lanes x, float low, float high) {
  // Both instructions return the second operand if one is NaN: a NaN in x stays.
  return _mm512_maskz_min_ps(0xffff, Lanes{} + high, _mm512_maskz_max_ps(0xffff, Lanes{} + low, x));
}
NRL_INLINE Lanes scale_by_power(Lanes x, Lanes shifted) {
  return _mm512_maskz_scalef_ps(0xffff, x, shifted - rounding_magic);
}
#endif

/// e^x within 1.5 ulp, subnormal results included; infinities and NaN as std::exp. The polynomial is the
/// minimax fit of (e^r - 1 - r) / r^2 on |r| <= ln(2)/2.
template <class V>
NRL_INLINE V exp_f32(V x) {
  x = clamp(x, -104.0f, 89.0f);
  const V shifted = x * 1.44269504f + rounding_magic, n = shifted - rounding_magic;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts, the first exact times n
  V q = V{} + 0.001392617612f;
  q = q * r + 0.008363173075f;
  q = q * r + 0.04166655466f;
  q = q * r + 0.1666657703f;
  q = q * r + 0.5f;
  return scale_by_power((q * (r * r) + r) + 1.0f, shifted);
}
/// The same within 2^-16, and e^87 above 87, whose reciprocal is a normal number.
template <class V>
NRL_INLINE V fast_exp(V x) {
  x = clamp(x, -104.0f, 87.0f);
  const V shifted = x * 1.44269504f + rounding_magic, n = shifted - rounding_magic;
  const V r = x - n * 0.69314718f;
  V q = V{} + 0.04127767336f;
  q = q * r + 0.1675353343f;
  q = q * r + 0.5000511823f;
  return scale_by_power((q * (r * r) + r) + 1.0f, shifted);
}

/// erf(x) within 2 ulp, with Math::exp; minimax fits of erf(x)/x in x^2 below 0.9 and of log(erfc(x)) above.
template <class Math, class V>
NRL_INLINE V erf_with(V x) {
  const V a = from_bits(bits_of(x) & 0x7fffffff);
  const V z = x * x;
  V p = V{} + 8.529042254e-5f;
  p = p * z - 0.0008179552031f;
  p = p * z + 0.005204220038f;
  p = p * z - 0.02686066227f;
  p = p * z + 0.1128371801f;
  p = p * z - 0.3761263519f;
  p = p * z + 0.128379167f;  // the 1 of 1.128... is added exactly below
  const V t = a > 4.0f ? V{} + 4.0f : a;
  V l = V{} + 1.643063656e-6f;
  l = l * t - 4.616385863e-5f;
  l = l * t + 0.0005975857702f;
  l = l * t - 0.004762625833f;
  l = l * t + 0.02642763715f;
  l = l * t - 0.1100871665f;
  l = l * t - 0.6318239181f;
  l = l * t - 1.130231055f;
  l = l * t + 0.0003185396624f;
  const V large = 1.0f - Math::exp(l);  // of |x|; below it gets the sign of x
  return a < 0.9f ? x * p + x : from_bits(bits_of(large) | (bits_of(x) & int32_t(0x80000000)));
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
  template <class V>
  NRL_INLINE V exp(V x) {
    return exp_f32(x);
  }
  template <class V>
  NRL_INLINE V erf(V x) {
    return erf_with<SimdMath>(x);
  }
  NRL_INLINE float sqrt(float x) { return std::sqrt(x); }
  template <class V>
  NRL_INLINE V reciprocal(V x) {
    return 1.0f / x;
  }
};
/// The same with errors up to 2^-16, for vectors of results that are rounded to 16 bits. Arguments and
/// results of reciprocal() must be normal numbers.
struct RoundedMath {
  NRL_INLINE Lanes exp(Lanes x) { return fast_exp(x); }
  NRL_INLINE Lanes erf(Lanes x) { return erf_with<RoundedMath>(x); }
  NRL_INLINE Lanes reciprocal(Lanes x) {
#if defined(NRL_ISA_avx512)
    const Lanes y = _mm512_maskz_rcp14_ps(0xffff, x);
    return y + y * (1.0f - x * y);  // a step of Newton's method doubles the 14 bits
#else
    return 1.0f / x;
#endif
  }
};
template <class T>
using MathFor = std::conditional_t<sizeof(T) == sizeof(float), SimdMath, RoundedMath>;

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
