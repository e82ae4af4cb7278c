#include "core/ops/grouped_linear.h"

#include <algorithm>

#include "core/ops/kernel_table.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/scratch.h"
#include "core/trace/trace.h"

namespace nrl::ops {
namespace {

/// The experts' matrices (M, K), against (R, M) and (R, K) rows.
void check(const char* op, const Tensor& wide, const Tensor& x, const Tensor& offsets, const Tensor& weight,
           DType weight_type) {
  const auto is_rows = [](const Tensor& t) {
    return t.rank == 2 && (t.data || t.numel() == 0) && is_float(t) && dense_rows(t);
  };
  NRL_CHECK(is_rows(wide) && is_rows(x) && wide.dim(0) == x.dim(0) && wide.dtype == x.dtype,
            "{}: rows are {} and {}, wanted one of f32, bf16 and f16 with contiguous columns", op,
            describe(wide), describe(x));
  NRL_CHECK(offsets.rank == 1 && offsets.dim(0) >= 2 && is_vector(offsets, offsets.dim(0), DType::i32),
            "{}: offsets are {}", op, describe(offsets));
  const int64_t experts = offsets.dim(0) - 1;
  NRL_CHECK(weight.data && weight.rank == 2 && weight.contiguous() && weight.dtype == weight_type &&
                weight.dim(0) == experts * wide.dim(1) && weight.dim(1) == x.dim(1),
            "{}: weights are {}, wanted contiguous {}[{} x {}, {}]", op, describe(weight),
            name_of(weight_type), experts, wide.dim(1), x.dim(1));
}

Cost grouped_cost(const Tensor& left, const Tensor& right, const Tensor& result, int64_t m, int64_t k,
                  bool accumulate) {
  const int64_t rows = left.dim(0);
  const double accumulated = accumulate ? bytes_of(result) : 0;
  return {.work = Work::gemm,
          .read = bytes_of(left, right) + accumulated,
          .written = bytes_of(result),
          .flops = linear_flops(rows, m, k),
          .operands = left.dtype,
          .gemm = {rows, m, k},
          .epilogue = accumulated + bytes_of(result)};
}

}  // namespace

Cost cost(const Exec&, const GroupedLinearForward& a) {
  return grouped_cost(a.x, a.weight, a.out, a.out.dim(1), a.x.dim(1), false);
}
Cost cost(const Exec&, const GroupedLinearBackwardData& a) {
  return grouped_cost(a.dout, a.weight, a.dx, a.dx.dim(1), a.dout.dim(1), false);
}
Cost cost(const Exec&, const GroupedLinearBackwardWeight& a) {
  return grouped_cost(a.dout, a.x, a.dweight, a.dout.dim(1), a.x.dim(1), a.accumulate);
}

void grouped_linear_forward(Exec& exec, const GroupedLinearForward& a) {
  if (noted(exec, Kernel::grouped_linear_forward, a)) return;
  check("grouped_linear_forward", a.out, a.x, a.offsets, a.weight, a.x.dtype);
  const trace::Range range("grouped_linear_forward");
  if (a.out.numel() > 0) exec.kernels->grouped_linear_forward(exec, a);
}

void grouped_linear_backward_data(Exec& exec, const GroupedLinearBackwardData& a) {
  if (noted(exec, Kernel::grouped_linear_backward_data, a)) return;
  check("grouped_linear_backward_data", a.dout, a.dx, a.offsets, a.weight, a.dx.dtype);
  const trace::Range range("grouped_linear_backward_data");
  if (a.dx.numel() > 0) exec.kernels->grouped_linear_backward_data(exec, a);
}

void grouped_linear_backward_weight(Exec& exec, const GroupedLinearBackwardWeight& a) {
  if (noted(exec, Kernel::grouped_linear_backward_weight, a)) return;
  check("grouped_linear_backward_weight", a.dout, a.x, a.offsets, a.dweight, DType::f32);
  const trace::Range range("grouped_linear_backward_weight");
  exec.kernels->grouped_linear_backward_weight(exec, a);
}

size_t grouped_linear_workspace(int64_t n, int64_t m, int64_t k, DType dtype, int threads,
                                Bf16Products products) {
  const size_t each = linear_varying_workspace(n, m, k, dtype, 1, products);
  return static_cast<size_t>(std::max(threads, 1)) * scratch_bytes(static_cast<int64_t>(each), 1) +
         scratch_alignment;
}

}  // namespace nrl::ops
