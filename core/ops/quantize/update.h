#pragma once
// One column of UpdateScales, for the CPU and the GPU.

#include "core/ops/quantize.h"
#include "core/ops/shared/fp8.h"

namespace nrl::ops::fp8 {

/// `amax`: the column's first element, `step` elements between its rows.
NRL_HOST_DEVICE inline void update_scale(float* amax, int64_t step, int64_t rows, float* scale, DType format,
                                         int margin, bool most_recent, bool keep) {
  float largest = 0.0f;
  for (int64_t i = rows - 1; i >= 0; --i) {
    const float measured = amax[i * step];
    const float value = bits_of(measured) < infinity_bits ? measured : 0.0f;
    if (i == 0 && most_recent) largest = 0.0f;
    largest = value > largest ? value : largest;
    if (i + 1 < rows) amax[(i + 1) * step] = value;
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
