// Linear layers of experts on the CPU: the GEMMs of linear/cpu.cpp, expert by expert. With many experts each
// thread takes whole experts; with few, all threads share each expert's GEMM. How much an expert has to do
// depends on the router, so the choice does not depend on timing but on the number of rows alone.

#include <algorithm>

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/scratch.h"

namespace nrl::ops::NRL_ISA {
namespace {

/// Calls body(exec, e, first row, rows) for each expert, with an Exec for its GEMM.
template <class Body>
void for_experts(Exec& exec, const Tensor& offsets, const Body& body) {
  const int32_t* begin = data_of<const int32_t>(offsets);
  const int64_t experts = offsets.dim(0) - 1;
  int64_t largest = 0;
  for (int64_t e = 0; e < experts; ++e) largest = std::max<int64_t>(largest, begin[e + 1] - begin[e]);
  // One expert must not keep a thread busy when the others are done.
  const bool apart = exec.threads > 1 && largest * exec.threads <= begin[experts];
  if (!apart) {
    for (int64_t e = 0; e < experts; ++e) body(exec, e, begin[e], begin[e + 1] - begin[e]);
    return;
  }
  const size_t share =
      exec.workspace.size / static_cast<size_t>(exec.threads) / scratch_alignment * scratch_alignment;
  cpu::parallel_tasks(exec.threads, experts, [&](int64_t e, int thread) {
    Exec own = exec;
    own.threads = 1;
    own.workspace = {exec.workspace.data + static_cast<size_t>(thread) * share, share};
    body(own, e, begin[e], begin[e + 1] - begin[e]);
  });
}

/// Expert e's rows [row, row + rows) of `t`. In FP8 they are where quantize() puts them.
Tensor rows_of(const Tensor& t, int64_t e, int64_t row, int64_t rows) {
  if (!is_fp8(t)) return t.rows(row, rows);
  const int64_t unit = row_unit(t.scales.kind);
  Tensor part = t.rows(group_begin(row, e, unit), (rows + unit - 1) / unit * unit);
  part.shape[0] = rows;
  return part;
}

/// Expert e's rows as columns of a transposed FP8 copy, with their padding.
Tensor columns_of(const Tensor& t, int64_t e, int64_t row, int64_t rows) {
  const int64_t unit = row_unit(t.scales.kind);
  return t.columns(group_begin(row, e, unit), (rows + unit - 1) / unit * unit);
}

void forward_kernel(Exec& exec, const GroupedLinearForward& a) {
  const int64_t m = a.out.dim(1);
  for_experts(exec, a.offsets, [&](Exec& own, int64_t e, int64_t row, int64_t rows) {
    if (rows > 0)
      own.kernels->linear_forward(
          own,
          {.x = rows_of(a.x, e, row, rows), .weight = a.weight.rows(e * m, m), .out = a.out.rows(row, rows)});
  });
}

void backward_data_kernel(Exec& exec, const GroupedLinearBackwardData& a) {
  const int64_t m = a.dout.dim(1), k = a.dx.dim(1);
  for_experts(exec, a.offsets, [&](Exec& own, int64_t e, int64_t row, int64_t rows) {
    if (rows > 0 && is_fp8(a.dout))
      own.kernels->linear_forward(own, {.x = rows_of(a.dout, e, row, rows),
                                        .weight = a.weight.rows(e * k, k),
                                        .out = a.dx.rows(row, rows)});
    else if (rows > 0)
      own.kernels->linear_backward_data(
          own,
          {.dout = a.dout.rows(row, rows), .weight = a.weight.rows(e * m, m), .dx = a.dx.rows(row, rows)});
  });
}

void backward_weight_kernel(Exec& exec, const GroupedLinearBackwardWeight& a) {
  const int64_t m = a.dweight.dim(0) / (a.offsets.dim(0) - 1), k = a.dweight.dim(1);
  for_experts(exec, a.offsets, [&](Exec& own, int64_t e, int64_t row, int64_t rows) {
    const Tensor dweight = a.dweight.rows(e * m, m);
    if (rows > 0 && is_fp8(a.dout))
      own.kernels->linear_forward(own, {.x = columns_of(a.dout, e, row, rows),
                                        .weight = columns_of(a.x, e, row, rows),
                                        .out = dweight,
                                        .accumulate = a.accumulate});
    else if (rows > 0)
      own.kernels->linear_backward_weight(own, {.dout = a.dout.rows(row, rows),
                                                .x = a.x.rows(row, rows),
                                                .dweight = dweight,
                                                .accumulate = a.accumulate});
    else if (!a.accumulate)
      std::fill_n(data_of<float>(dweight), m * k, 0.0f);
  });
}

}  // namespace

void fill_grouped_linear(KernelTable& table) {
  table.grouped_linear_forward = forward_kernel;
  table.grouped_linear_backward_data = backward_data_kernel;
  table.grouped_linear_backward_weight = backward_weight_kernel;
}

}  // namespace nrl::ops::NRL_ISA
