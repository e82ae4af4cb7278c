#pragma once
// Element types, and bf16 as a storage-only type.

#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "core/base/host_device.h"

namespace nrl {

enum class DType : uint8_t { f32, f16, bf16, e4m3, e5m2, f64, i32, i64, u16, u8 };

/// Bytes of one element.
constexpr int64_t size_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
    case DType::u16:
      return 2;
    default:
      return 1;
  }
}

/// The spelling used in messages and JSON: "f32", "bf16", ...
constexpr std::string_view name_of(DType t) {
  constexpr std::string_view names[] = {"f32", "f16", "bf16", "e4m3", "e5m2",
                                        "f64", "i32", "i64",  "u16",  "u8"};
  return names[static_cast<int>(t)];
}

/// bfloat16 storage; arithmetic is in fp32. Conversion from float rounds to nearest even and preserves NaN.
struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  NRL_HOST_DEVICE explicit bf16(float f) {
    const uint32_t u = __builtin_bit_cast(uint32_t, f);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? ((u >> 16) | 0x40u) : rounded);
  }
  NRL_HOST_DEVICE operator float() const {
    return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
  }
};

/// IEEE half precision as storage, like bf16: rounded to nearest even, overflow to infinity, NaN stays NaN.
struct f16 {
  uint16_t bits = 0;
  f16() = default;
  NRL_HOST_DEVICE explicit f16(float f) {
    const uint32_t all = __builtin_bit_cast(uint32_t, f), u = all & 0x7fffffffu;
    uint32_t half;
    if (u >= 0x47800000u) {  // 2^16 and more, infinity, NaN
      half = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (u < 0x38800000u) {  // below the normal numbers: the addition rounds at the last place of 2^-24
      half = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, u) + 0.5f) - 0x3f000000u;
    } else {
      half = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;
    }
    bits = static_cast<uint16_t>(half | (all >> 16 & 0x8000u));
  }
  NRL_HOST_DEVICE operator float() const {
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13,
                   exponent = magnitude & 0x0f800000u;
    uint32_t u = magnitude + 0x38000000u;
    if (exponent == 0x0f800000u) {
      u += 0x38000000u;
    } else if (exponent == 0) {  // subnormal: 2^-14 (1 + m) - 2^-14
      u = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude + 0x38800000u) - 0x1p-14f);
    }
    return __builtin_bit_cast(float, u | static_cast<uint32_t>(bits & 0x8000u) << 16);
  }
};

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct dtype_of<uint16_t> {
  static constexpr DType value = DType::u16;
};
template <>
struct dtype_of<uint8_t> {
  static constexpr DType value = DType::u8;
};

}  // namespace nrl
