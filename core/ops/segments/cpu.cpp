// Sums over segments on the CPU; formulas in core/ops/segments.h. A sum has one number per row, a thousandth
// of what the head does for it: one thread adds all rows in their order.

#include <algorithm>

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

void segment_sum_kernel(Exec&, const SegmentSum& a) {
  const float* x = data_of<const float>(a.x);
  const float* minus = data_of<const float>(a.minus);
  const int* target = data_of<const int>(a.target);
  const int* segment = data_of<const int>(a.segment);
  double* out = data_of<double>(a.out);
  const int64_t n = a.x.numel(), segments = a.out.numel();
  std::fill_n(out, segments, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t s = segment[i];
    if (target[i] < 0 || s < 0 || s >= segments) continue;
    out[s] += static_cast<double>(x[i]) - (minus ? static_cast<double>(minus[i]) : 0.0);
  }
}

void segment_rows_kernel(Exec& exec, const SegmentRows& a) {
  const double* values = data_of<const double>(a.values);
  const int* target = data_of<const int>(a.target);
  const int* segment = data_of<const int>(a.segment);
  float* out = data_of<float>(a.out);
  const int64_t segments = a.values.numel();
  cpu::parallel_for(exec.threads, a.out.numel(), 4096, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t s = segment[i];
      out[i] = target[i] < 0 || s < 0 || s >= segments ? 0.0f : static_cast<float>(values[s]);
    }
  });
}

}  // namespace

void fill_segments(KernelTable& table) {
  table.segment_sum = segment_sum_kernel;
  table.segment_rows = segment_rows_kernel;
}

}  // namespace nrl::ops::NRL_ISA
