// Dropout on the CPU: out = keep(element) ? x / (1 - p) : 0, + residual. Rows are split over the threads; the
// mask is a function of the global element.

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/dropout_mask.h"

namespace nrl::ops::NRL_ISA {
namespace {

template <class T>
void mask_chunk(const T* x, const T* residual, T* out, const uint32_t* words, int64_t n, float p,
                float scale) {
  if (!residual) {
    for_lanes(n, [=](int64_t i, auto part) {
      part.store(out + i, DropoutMask::apply(part.load(x + i), part.load(words + i), p, scale));
    });
    return;
  }
  for_lanes(n, [=](int64_t i, auto part) {
    part.store(out + i, DropoutMask::apply(part.load(x + i), part.load(words + i), p, scale) +
                            part.load(residual + i));
  });
}

template <class T>
void run(Exec& exec, const Dropout& a) {
  const int64_t n = a.x.dim(0), h = a.x.dim(1), width = a.width > 0 ? a.width : h;
  const auto* rows = static_cast<const int32_t*>(a.rows.data);
  const DropoutMask mask(a.p, a.seed, a.stream, a.step);
  cpu::parallel_for(exec.threads, n, std::max<int64_t>(1, 8192 / h), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* x = data_of<const T>(a.x) + r * a.x.stride[0];
      const T* residual = a.residual ? data_of<const T>(a.residual) + r * a.residual.stride[0] : nullptr;
      T* out = data_of<T>(a.out) + r * a.out.stride[0];
      mask.for_words((a.first_row + (rows ? rows[r] : r)) * width + a.first_column, h,
                     [&](int64_t i, const uint32_t* words, int64_t count) {
                       mask_chunk(x + i, residual ? residual + i : nullptr, out + i, words, count, mask.p,
                                  mask.scale);
                     });
    }
  });
}

void dropout_kernel(Exec& exec, const Dropout& a) {
  for_float_type(a.x.dtype, [&]<class T>() { run<T>(exec, a); });
}

}  // namespace

void fill_dropout(KernelTable& table) {
  table.dropout = dropout_kernel;
}

}  // namespace nrl::ops::NRL_ISA
