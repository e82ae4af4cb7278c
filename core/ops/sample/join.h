#pragma once
// One row of join_samples(), for the CPU and the GPU.

#include <cmath>
#include <cstdint>

#include "core/base/host_device.h"
#include "core/ops/sample.h"

namespace nrl::ops::sample {

struct Joined {
  int32_t token;
  float log_prob;
};

/// `parts` of row `row` of `rows`, in `slices` slices.
NRL_HOST_DEVICE inline Joined join(const float* parts, int64_t slices, int64_t rows, int64_t row) {
  const auto part = [&](int64_t slice) { return parts + (slice * rows + row) * SamplePart::columns; };
  const float* best = nullptr;
  float largest = part(0)[SamplePart::largest];
  for (int64_t i = 0; i < slices; ++i) {
    const float* p = part(i);
    largest = p[SamplePart::largest] > largest ? p[SamplePart::largest] : largest;
    // Slices come in the order of their tokens: of equal scores the first stays.
    if (p[SamplePart::token] >= 0.0f && (!best || p[SamplePart::score] > best[SamplePart::score])) best = p;
  }
  float sum = 0;
  for (int64_t i = 0; i < slices; ++i)
    sum += part(i)[SamplePart::sum] * expf(part(i)[SamplePart::largest] - largest);
  if (!best) return {-1, 0.0f};
  return {static_cast<int32_t>(best[SamplePart::token]), best[SamplePart::value] - largest - logf(sum)};
}

}  // namespace nrl::ops::sample
