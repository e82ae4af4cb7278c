#pragma once
// Optimizer state in reduced formats, one number at a time, for the CPU, the GPU and checkpoints; formulas in
// core/ops/optimizer.h. Everything is branch-free.

#include "core/ops/shared/fp8.h"

namespace nrl::ops::fp8 {
template <>
struct Fields<DType::f16> {
  static constexpr int mantissa = 10, bias = 15, largest = 15;
};
}  // namespace nrl::ops::fp8

namespace nrl::ops::moments {

using fp8::bits_of;
using fp8::float_of;

/// Instead of random bits: rounds to nearest, halves away from zero.
inline constexpr uint32_t to_nearest = 0x80000000u;

/// A hash with good avalanche (Wellons' lowbias32).
NRL_HOST_DEVICE inline __attribute__((always_inline)) uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

/// The bits that round `x`, the new state of an element with this gradient. A function of values and the
/// step, not of a position, so that they are the same on every layout.
NRL_HOST_DEVICE inline __attribute__((always_inline)) uint32_t random_bits(uint32_t seed, float grad,
                                                                           float x) {
  return mix(mix(seed ^ bits_of(grad)) ^ bits_of(x));
}

/// The seed for weights, whose random bits differ from the bits of the state.
NRL_HOST_DEVICE inline __attribute__((always_inline)) uint32_t seed_of_weights(uint32_t seed) {
  return seed + 0x9e3779b9u;
}

/// x rounded up with the probability of the dropped part: bits dropped / 2^16.
NRL_HOST_DEVICE inline __attribute__((always_inline)) uint32_t encode_bf16(float x, uint32_t random) {
  const uint32_t u = bits_of(x), magnitude = u & fp8::magnitude_bits;
  const uint32_t special = u >> 16 | (magnitude > fp8::infinity_bits ? 0x40u : 0u);
  return magnitude >= fp8::infinity_bits ? special : (u + (random >> 16)) >> 16;
}

/// The code of a finite x within the format's range, without its sign, rounded up with the probability of
/// the dropped part. `format`: f16 or e4m3.
template <DType format>
NRL_HOST_DEVICE inline __attribute__((always_inline)) uint32_t encode_magnitude(float x, uint32_t random) {
  using F = fp8::Fields<format>;
  constexpr int dropped = 23 - F::mantissa;
  constexpr uint32_t rebias = static_cast<uint32_t>(127 - F::bias) << 23;
  constexpr uint32_t smallest_normal = rebias + (1u << 23);
  // 2^16 / the distance of subnormal numbers.
  constexpr uint32_t units = static_cast<uint32_t>(127 + F::bias - 1 + F::mantissa + 16) << 23;
  const uint32_t u = bits_of(x) & fp8::magnitude_bits;
  const uint32_t normal = (u - rebias + (random >> (32 - dropped))) >> dropped;
  const float small = float_of(u < smallest_normal ? u : 0u) * float_of(units);
  const uint32_t subnormal = (static_cast<uint32_t>(static_cast<int32_t>(small)) + (random >> 16)) >> 16;
  return u < smallest_normal ? subnormal : normal;
}

/// Bits of the code without its sign.
template <DType format>
inline constexpr int magnitude_width = format == DType::f16 ? 15 : 7;

/// The code of x, which is 0 only if x is, if `nonzero`.
template <DType format>
NRL_HOST_DEVICE inline __attribute__((always_inline)) uint32_t encode(float x, uint32_t random,
                                                                      bool nonzero) {
  const uint32_t code = encode_magnitude<format>(x, random);
  const uint32_t least = nonzero && (bits_of(x) & fp8::magnitude_bits) != 0 ? 1u : 0u;
  return (code < least ? least : code) | (bits_of(x) >> 31 << magnitude_width<format>);
}

template <DType format>
NRL_HOST_DEVICE inline __attribute__((always_inline)) float decode(uint32_t code) {
  using F = fp8::Fields<format>;
  constexpr int width = magnitude_width<format>;
  constexpr uint32_t rebias = static_cast<uint32_t>(127 - F::bias) << 23;
  constexpr uint32_t last_place = static_cast<uint32_t>(127 + 1 - F::bias - F::mantissa) << 23;
  const uint32_t magnitude = code & ((1u << width) - 1);
  const float normal = float_of((magnitude << (23 - F::mantissa)) + rebias);
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * float_of(last_place);
  const float value = magnitude < (1u << F::mantissa) ? subnormal : normal;
  return float_of(bits_of(value) | code >> width << 31);
}

/// An fp32 number as bf16, rounded to nearest with halves away from zero, and the lower half of its bits.
/// Half away from zero rather than to even, because then the two give the number back.
struct Split {
  uint16_t high, low;
};
NRL_HOST_DEVICE inline __attribute__((always_inline)) Split split(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t number = (u & fp8::magnitude_bits) > fp8::infinity_bits ? 0x7fc00000u : u;
  return {static_cast<uint16_t>((number + 0x8000u) >> 16), static_cast<uint16_t>(number)};
}
NRL_HOST_DEVICE inline __attribute__((always_inline)) float join(Split s) {
  const uint32_t low = s.low;
  return float_of((static_cast<uint32_t>(s.high) - (low >> 15)) << 16 | low);
}

}  // namespace nrl::ops::moments
