#pragma once
// Element types, and bf16 and f16 as storage-only types.

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
/// Conversions are branch-free, with selections by arithmetic, so that loops over them become vector code.
struct f16 {
  uint16_t bits = 0;
  f16() = default;
  NRL_HOST_DEVICE explicit f16(float f) : bits(round(f)) {}
  NRL_HOST_DEVICE __attribute__((always_inline)) operator float() const {
    const int32_t magnitude = (bits & 0x7fff) << 13;
    const int32_t normal = magnitude + select_below(magnitude, 0x0f800000, 0x38000000, 0x70000000);
    // 2^-14 (1 + m) - 2^-14
    const float subnormal = __builtin_bit_cast(float, magnitude + 0x38800000) - 0x1p-14f;
    const int32_t u = select_below(magnitude, 0x00800000, __builtin_bit_cast(int32_t, subnormal), normal);
    return __builtin_bit_cast(float, static_cast<uint32_t>(u) | static_cast<uint32_t>(bits & 0x8000u) << 16);
  }
  /// The bits of f16(f).
  static NRL_HOST_DEVICE __attribute__((always_inline)) uint16_t round(float f) {
    const int32_t all = __builtin_bit_cast(int32_t, f), u = all & 0x7fffffff;
    // Below the normal numbers the addition rounds at the last place of 2^-24.
    const int32_t subnormal = __builtin_bit_cast(int32_t, __builtin_bit_cast(float, u) + 0.5f) - 0x3f000000;
    const int32_t normal = (u - 0x38000000 + 0xfff + ((u >> 13) & 1)) >> 13;
    const int32_t special = select_below(u, 0x7f800001, 0x7c00, 0x7e00);  // 2^16 and more, infinity; NaN
    const int32_t half = select_below(u, 0x38800000, subnormal, select_below(u, 0x47800000, normal, special));
    return static_cast<uint16_t>(half | (all >> 16 & 0x8000));
  }

 private:
  /// x < limit ? yes : no, for x >= 0 and limit > 0.
  static NRL_HOST_DEVICE __attribute__((always_inline)) int32_t select_below(int32_t x, int32_t limit,
                                                                             int32_t yes, int32_t no) {
    const int32_t below = (x - limit) >> 31;
    return (yes & below) | (no & ~below);
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
