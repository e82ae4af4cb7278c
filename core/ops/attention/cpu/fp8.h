#pragma once
// FP8 numbers in vectors of float, compiled once per instruction set: operands of attention are stored as
// codes, and probabilities and gradients of scores are rounded to numbers of a format where they are
// computed.

#include <cstdint>
#include <cstring>

#include "core/ops/shared/cpu/lanes.h"
#include "core/ops/shared/fp8.h"

namespace nrl::ops::NRL_ISA {

typedef uint8_t ByteLanes __attribute__((vector_size(lanes), may_alias));

/// As fp8::decode_any().
template <DType format>
NRL_INLINE Lanes load(const fp8::Number<format>* p) {
  using F = fp8::Fields<format>;
  ByteLanes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  const WordLanes codes = __builtin_convertvector(bytes, WordLanes), magnitude = codes & 0x7fu;
  const WordLanes normal = (magnitude << (23 - F::mantissa)) + (static_cast<uint32_t>(127 - F::bias) << 23);
  const float last_place = fp8::float_of(static_cast<uint32_t>(127 + 1 - F::bias - F::mantissa) << 23);
  const Lanes subnormal = __builtin_convertvector(reinterpret_cast<IntLanes>(magnitude), Lanes) * last_place;
  WordLanes value = magnitude < (1u << F::mantissa) ? reinterpret_cast<WordLanes>(subnormal) : normal;
  value = magnitude > fp8::largest_code<format> ? WordLanes{} + 0x7fc00000u : value;
  return reinterpret_cast<Lanes>(value | (codes & 0x80u) << 24);
}

/// The number of the format that is nearest to each x, even if two are; those beyond its range become the
/// largest, NaN stays NaN.
template <DType format>
NRL_INLINE Lanes rounded_to(Lanes x) {
  using F = fp8::Fields<format>;
  constexpr int dropped = 23 - F::mantissa;
  constexpr uint32_t smallest_normal = static_cast<uint32_t>(127 + 1 - F::bias) << 23,
                     last_bits = (1u << dropped) - 1;
  // Adding this rounds at the last place of the subnormal numbers.
  const float magic = fp8::float_of(static_cast<uint32_t>(127 + 1 - F::bias + dropped) << 23);
  const WordLanes bits = reinterpret_cast<WordLanes>(x), u = bits & fp8::magnitude_bits;
  const Lanes size = reinterpret_cast<Lanes>(u);
  const WordLanes normal = (u + (last_bits >> 1) + (u >> dropped & 1u)) & ~last_bits,
                  subnormal = reinterpret_cast<WordLanes>((size + magic) - magic);
  Lanes value = reinterpret_cast<Lanes>(u < smallest_normal ? subnormal : normal);
  value = value > fp8::largest_number<format> ? Lanes{} + fp8::largest_number<format> : value;
  value = x == x ? value : x;
  return reinterpret_cast<Lanes>(reinterpret_cast<WordLanes>(value) | (bits & ~fp8::magnitude_bits));
}

}  // namespace nrl::ops::NRL_ISA
