#pragma once
// One fp8 number and one scale, for the CPU and the GPU.

#include <cstdint>

#include "core/base/dtype.h"
#include "core/base/host_device.h"

namespace nrl::ops::fp8 {

inline constexpr uint32_t infinity_bits = 0x7f800000u, magnitude_bits = 0x7fffffffu;
inline constexpr uint32_t zero_scale = 0, bad_scale = 255;

// No constant expressions: nvcc's front end cannot evaluate the casts.
NRL_HOST_DEVICE inline __attribute__((always_inline)) float float_of(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
NRL_HOST_DEVICE inline __attribute__((always_inline)) uint32_t bits_of(float x) {
  return __builtin_bit_cast(uint32_t, x);
}

/// The fields of a format: bits of the mantissa, bias of the exponent, exponent of the largest number, which
/// is 1.75 * 2^largest in both.
template <DType format>
struct Fields;
template <>
struct Fields<DType::e4m3> {
  static constexpr int mantissa = 3, bias = 7, largest = 8;
};
template <>
struct Fields<DType::e5m2> {
  static constexpr int mantissa = 2, bias = 15, largest = 15;
};

/// The scale byte of a block whose largest magnitude has these bits.
template <DType format>
NRL_HOST_DEVICE inline __attribute__((always_inline)) uint32_t scale_of(uint32_t largest) {
  if (largest >= infinity_bits) return bad_scale;
  if (largest == 0) return zero_scale;
  const int exponent =
      static_cast<int>(largest >> 23) - Fields<format>::largest + ((largest & 0x7fffffu) > 0x600000u ? 1 : 0);
  return exponent < 1 ? 1u : static_cast<uint32_t>(exponent);
}

/// 2^(byte - 127), and its inverse for bytes that scale_of() gives: both are normal numbers.
NRL_HOST_DEVICE inline __attribute__((always_inline)) float scale_value(uint32_t byte) {
  return byte == bad_scale ? float_of(0x7fc00000u) : float_of(byte << 23);
}
NRL_HOST_DEVICE inline __attribute__((always_inline)) float inverse_scale(uint32_t byte) {
  const bool special = byte == bad_scale || byte == zero_scale;
  return special ? 0.0f : float_of((254u - byte) << 23);
}

/// A finite number within the format's range, rounded to nearest even.
template <DType format>
NRL_HOST_DEVICE inline __attribute__((always_inline)) uint32_t encode(float x) {
  using F = Fields<format>;
  constexpr int dropped = 23 - F::mantissa;
  constexpr uint32_t rebias = static_cast<uint32_t>(127 - F::bias) << 23;
  constexpr uint32_t smallest_normal = rebias + (1u << 23);
  // Adding this rounds at the last place of the subnormal numbers.
  constexpr uint32_t magic = static_cast<uint32_t>(127 + 1 - F::bias + dropped) << 23;
  const uint32_t bits = bits_of(x), u = bits & magnitude_bits;
  const uint32_t normal = (u - rebias + ((1u << (dropped - 1)) - 1) + ((u >> dropped) & 1u)) >> dropped;
  const uint32_t subnormal = bits_of(float_of(u) + float_of(magic)) - magic;
  return (u < smallest_normal ? subnormal : normal) | (bits >> 24 & 0x80u);
}

template <DType format>
NRL_HOST_DEVICE inline __attribute__((always_inline)) float decode(uint32_t byte) {
  using F = Fields<format>;
  constexpr uint32_t rebias = static_cast<uint32_t>(127 - F::bias) << 23;
  constexpr uint32_t last_place = static_cast<uint32_t>(127 + 1 - F::bias - F::mantissa) << 23;
  const uint32_t magnitude = byte & 0x7fu, sign = (byte & 0x80u) << 24;
  const float normal = float_of((magnitude << (23 - F::mantissa)) + rebias);
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * float_of(last_place);
  const float value = magnitude < (1u << F::mantissa) ? subnormal : normal;
  return float_of(bits_of(value) | sign);
}

}  // namespace nrl::ops::fp8
