#pragma once
// Largest magnitudes, as bits, which order as the values do: NaN is above everything and stays.

#include <algorithm>
#include <cstdint>

#include "core/ops/shared/cpu/lanes.h"

namespace nrl::ops::NRL_ISA {

NRL_INLINE uint32_t magnitude(float x) {
  return __builtin_bit_cast(uint32_t, x) & 0x7fffffffu;
}

template <class T>
NRL_INLINE uint32_t max_magnitude(const T* x, int64_t n) {
  uint32_t amax = 0;
#pragma omp simd reduction(max : amax)
  for (int64_t i = 0; i < n; ++i) amax = std::max(amax, magnitude(static_cast<float>(x[i])));
  return amax;
}

/// *shared_amax = max(*shared_amax, amax); several threads may call it at once.
NRL_INLINE void combine_amax(float* shared_amax, uint32_t amax) {
  auto* bits = reinterpret_cast<uint32_t*>(shared_amax);
  uint32_t old = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (old < amax &&
         !__atomic_compare_exchange_n(bits, &old, amax, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

}  // namespace nrl::ops::NRL_ISA
