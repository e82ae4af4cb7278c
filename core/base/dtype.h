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
