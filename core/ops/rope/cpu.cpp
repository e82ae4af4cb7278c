// Rotary embedding on the CPU, in place: (x1, x2) = (x1 cos - x2 sin, x2 cos + x1 sin) for the pairs (i, i +
// half) of every head; tokens are split over the threads.

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/amax.h"
#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/element.h"

namespace nrl::ops::NRL_ISA {
namespace {

template <class T>
void rotate(Exec& exec, const Rope& a) {
  const int64_t n = a.x.dim(0), heads = a.x.dim(1), half = a.table.dim(1) / 2;
  const float* table = data_of<const float>(a.table);
  const int32_t* positions = data_of<const int32_t>(a.positions);
  const float sign = a.inverse ? -1.0f : 1.0f;
  const int64_t grain = std::max<int64_t>(1, 16384 / (heads * std::max<int64_t>(2 * half, 1)));
  cpu::parallel_for(exec.threads, n, grain, [&](int64_t begin, int64_t end) {
    uint32_t amax = 0;
    for (int64_t t = begin; t < end; ++t) {
      const float* cosines = table + positions[t] * 2 * half;
      const float* sines = cosines + half;
      for (int64_t h = 0; h < heads; ++h) {
        T* x1 = data_of<T>(a.x) + t * a.x.stride[0] + h * a.x.stride[1];
        T* x2 = x1 + half;
        for_lanes(half, [=](int64_t i, auto part) {
          const auto y = element::rope_pair(part.load(x1 + i), part.load(x2 + i), part.load(cosines + i),
                                            sign * part.load(sines + i));
          part.store(x1 + i, y.first);
          part.store(x2 + i, y.second);
        });
        if (a.amax) amax = std::max(amax, max_magnitude(x1, 2 * half));
      }
    }
    if (a.amax) combine_amax(data_of<float>(a.amax), amax);
  });
}

void rope_kernel(Exec& exec, const Rope& a) {
  for_float_type(a.x.dtype, [&]<class T>() { rotate<T>(exec, a); });
}

}  // namespace

void fill_rope(KernelTable& table) {
  table.rope = rope_kernel;
}

}  // namespace nrl::ops::NRL_ISA
