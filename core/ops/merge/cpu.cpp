// Sums of parts on the CPU. add_rows: out = or += x. merge_attention, for every query and head with
// m = max(lse, part_lse), a = exp(lse - m), b = exp(part_lse - m):
//
//   out = (a out + b part) / (a + b),  lse = m + log(a + b)
//
// Rows are split over the threads.

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t grain_elements = 8192;

template <class X, class O>
void add(Exec& exec, const AddRows& a) {
  const int64_t n = a.x.dim(0), width = a.x.dim(1);
  cpu::parallel_for(exec.threads, n, std::max<int64_t>(1, grain_elements / width),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t r = begin; r < end; ++r) {
                        const X* x = data_of<const X>(a.x) + r * a.x.step(0);
                        O* out = data_of<O>(a.out) + r * a.out.step(0);
                        if (a.accumulate) {
#pragma omp simd
                          for (int64_t i = 0; i < width; ++i)
                            store(out[i], static_cast<float>(out[i]) + static_cast<float>(x[i]));
                        } else {
#pragma omp simd
                          for (int64_t i = 0; i < width; ++i) store(out[i], static_cast<float>(x[i]));
                        }
                      }
                    });
}

template <class T>
void merge(Exec& exec, const MergeAttention& a) {
  const int64_t n = a.part.dim(0), heads = a.part.dim(1), d = a.part.dim(2);
  cpu::parallel_for(exec.threads, n, std::max<int64_t>(1, grain_elements / (heads * d)),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t r = begin; r < end; ++r)
                        for (int64_t h = 0; h < heads; ++h) {
                          const float part_lse = data_of<const float>(a.part_lse)[h * a.part_lse.step(0) + r];
                          if (part_lse == -std::numeric_limits<float>::infinity()) continue;
                          float& lse = data_of<float>(a.lse)[h * a.lse.step(0) + r];
                          const float m = std::max(lse, part_lse), old_weight = std::exp(lse - m),
                                      new_weight = std::exp(part_lse - m), sum = old_weight + new_weight;
                          const float keep = old_weight / sum, take = new_weight / sum;
                          const T* part = data_of<const T>(a.part) + r * a.part.step(0) + h * a.part.step(1);
                          float* out = data_of<float>(a.out) + r * a.out.step(0) + h * a.out.step(1);
#pragma omp simd
                          for (int64_t i = 0; i < d; ++i)
                            out[i] = out[i] * keep + static_cast<float>(part[i]) * take;
                          lse = m + std::log(sum);
                        }
                    });
}

void add_rows_kernel(Exec& exec, const AddRows& a) {
  for_float_type(a.x.dtype,
                 [&]<class X>() { for_float_type(a.out.dtype, [&]<class O>() { add<X, O>(exec, a); }); });
}

void merge_attention_kernel(Exec& exec, const MergeAttention& a) {
  for_float_type(a.part.dtype, [&]<class T>() { merge<T>(exec, a); });
}

}  // namespace

void fill_merge(KernelTable& table) {
  table.add_rows = add_rows_kernel;
  table.merge_attention = merge_attention_kernel;
}

}  // namespace nrl::ops::NRL_ISA
