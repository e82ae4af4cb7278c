#pragma once
// One fp8 number and one scale, for the CPU and the GPU.

#include <cstdint>

#include "core/base/dtype.h"
#include "core/base/host_device.h"
#include "core/base/scaling.h"

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

/// The byte of such a scale.
NRL_HOST_DEVICE inline __attribute__((always_inline)) uint32_t scale_byte(float scale) {
  return bits_of(scale) >> 23 & 0xffu;
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

/// NaN in both formats, and the largest number.
inline constexpr uint32_t nan_code = 0x7f;
template <DType format>
inline constexpr uint32_t largest_code =
    static_cast<uint32_t>(((Fields<format>::largest + Fields<format>::bias) << Fields<format>::mantissa) +
                          (format == DType::e4m3 ? 6 : 3));
template <DType format>
inline constexpr float largest_number = format == DType::e4m3 ? 448.0f : 57344.0f;

/// x * inverse, of a larger magnitude than the format has as its largest number. NaN and infinity are NaN.
template <DType format>
NRL_HOST_DEVICE inline __attribute__((always_inline)) uint32_t encode_saturating(float x, float inverse) {
  constexpr float most = largest_number<format>;
  float v = x * inverse;
  v = v < most ? v : most;
  v = v > -most ? v : -most;
  return (bits_of(x) & magnitude_bits) < infinity_bits ? encode<format>(v) : nan_code;
}

/// Any code.
template <DType format>
NRL_HOST_DEVICE inline __attribute__((always_inline)) float decode_any(uint32_t byte) {
  const float value = decode<format>(byte);
  return (byte & 0x7fu) > largest_code<format> ? float_of(0x7fc00000u) : value;
}

/// A number of tensor cores (nrl_mma_m16n8k32).
template <DType of>
struct Number {
  static constexpr DType format = of;
  uint8_t bits = 0;
  NRL_HOST_DEVICE operator float() const { return decode_any<of>(bits); }
};

/// The scale with which a tensor of this largest magnitude fits, 2^margin times over; `otherwise` if it is 0
/// or not finite. Its inverse is finite.
NRL_HOST_DEVICE inline float tensor_scale(float amax, DType format, int margin, float otherwise) {
  if (!(amax > 0.0f) || bits_of(amax) >= infinity_bits) return otherwise;
  const float most = format == DType::e4m3 ? largest_number<DType::e4m3> : largest_number<DType::e5m2>;
  const float power = float_of(static_cast<uint32_t>(127 + margin) << 23), smallest = float_of(1u << 23),
              largest = float_of(0x7f000000u);
  const float scale = amax / most * power;
  return scale < smallest ? smallest : scale > largest ? largest : scale;
}

/// The scale of element (row, column) of a matrix with these `scales`, at these steps.
NRL_HOST_DEVICE inline __attribute__((always_inline)) float scale_at(Scaling kind, const void* scales,
                                                                     int64_t row_step, int64_t column_step,
                                                                     int64_t row, int64_t column) {
  const auto* at =
      static_cast<const unsigned char*>(scales) + scale_offset(kind, row_step, column_step, row, column);
  return kind == Scaling::mx32 ? scale_value(*at) : *reinterpret_cast<const float*>(at);
}

}  // namespace nrl::ops::fp8
