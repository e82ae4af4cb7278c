#pragma once
// One column of UpdateScales, for the CPU and the GPU.

#include "core/ops/quantize.h"
#include "core/ops/shared/fp8.h"

namespace nrl::ops::fp8 {

/// `amax`: the column's first element, `step` elements between its rows.
NRL_HOST_DEVICE inline void update_scale(float* amax, int64_t step, int64_t rows, float* scale, DType format,
                                         int margin, bool most_recent, bool keep) {
  float largest = 0.0f;
  // Several rows are read before they move, so that a GPU does not wait for each.
  constexpr int together = 16;
  for (int64_t last = rows - 1; last >= 0; last -= together) {
    float measured[together];
    for (int j = 0; j < together; ++j) measured[j] = j <= last ? amax[(last - j) * step] : 0.0f;
    for (int j = 0; j < together; ++j) {
      const int64_t i = last - j;
      if (i < 0) break;
      const float value = bits_of(measured[j]) < infinity_bits ? measured[j] : 0.0f;
      if (i == 0 && most_recent) largest = 0.0f;
      largest = value > largest ? value : largest;
      if (i + 1 < rows) amax[(i + 1) * step] = value;
    }
  }
  amax[0] = 0.0f;
  *scale = tensor_scale(largest, format, margin, keep ? *scale : 1.0f);
}

/// The same of a block.
NRL_HOST_DEVICE inline void update_block_scale(float* amax, float* scale, DType format) {
  const uint32_t largest = bits_of(*amax);
  *scale =
      scale_value(format == DType::e4m3 ? scale_of<DType::e4m3>(largest) : scale_of<DType::e5m2>(largest));
  *amax = 0.0f;
}

}  // namespace nrl::ops::fp8
