#pragma once
// The order of numbers in top_columns(), for the CPU and the GPU.

#include <cstdint>
#include <cstring>

#include "core/base/host_device.h"

namespace nrl::ops::distillation {

/// The order of what is not there.
inline constexpr uint32_t no_order = 0;

/// Orders as the numbers do, above no_order: -0 as 0, NaN above all others.
NRL_HOST_DEVICE inline uint32_t order_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  if (bits == 0x80000000u) bits = 0;
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

}  // namespace nrl::ops::distillation
