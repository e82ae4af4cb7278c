#include "core/ops/grouped_linear.h"

#include <algorithm>

#include "core/device/runtime.h"
#include "core/ops/libraries.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/scratch.h"
#include "core/ops/traced.h"

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

/// Fails if the GPU has no GEMM for these FP8 operands: before a run begins, when kernels are collected.
void refuse_on_gpu(const Exec& exec, const Tensor& a, const Tensor& b) {
  // A dry run without a device has a configuration that was checked.
  if (!exec.libraries || !is_fp8(a) || !exec.device) return;
  const std::string why = fp8_gemm_refusal(exec.device->properties().major, a.scales.kind, b.scales.kind);
  if (!why.empty())
    fail(Exit::unavailable,
         "policy.fp8_cfg.fp8_recipe: this GPU has no FP8 GEMM of experts of {} x {}: {}. Fix: use another "
         "recipe, or policy.fp8_cfg.enabled: false",
         describe(a), describe(b), why);
}

/// FP8 operands `a` and `b`, of which `a` has the stored shape (a_rows, a_columns) and so on.
void check_fp8(const char* op, const Tensor& offsets, const Tensor& a, int64_t a_rows, int64_t a_columns,
               const Tensor& b, int64_t b_rows, int64_t b_columns) {
  const auto is_operand = [](const Tensor& t, int64_t rows, int64_t columns) {
    return t.data && is_fp8(t) && t.rank == 2 && t.dim(0) == rows && t.dim(1) == columns && dense_rows(t) &&
           t.scales.kind != Scaling::none && t.scales.data;
  };
  NRL_CHECK(is_operand(a, a_rows, a_columns) && is_operand(b, b_rows, b_columns),
            "{}: operands are {} and {}, wanted FP8 [{}, {}] and [{}, {}] with scales", op, describe(a),
            describe(b), a_rows, a_columns, b_rows, b_columns);
  NRL_CHECK(b.dtype == DType::e4m3, "{}: {} x {}, wanted e4m3 on the right", op, describe(a), describe(b));
  NRL_CHECK(offsets.rank == 1 && offsets.dim(0) >= 2 && is_vector(offsets, offsets.dim(0), DType::i32),
            "{}: offsets are {}", op, describe(offsets));
}

/// Rows of a copy of R rows by groups, which has at least grouped_rows() (quantize.h).
int64_t copied_rows(const char* op, const Tensor& copy, const Tensor& offsets, int64_t rows) {
  const int64_t least = grouped_rows(rows, offsets.dim(0) - 1, row_unit(copy.scales.kind));
  NRL_CHECK(copy.dim(0) >= least, "{}: an FP8 copy of {} rows for {} rows", op, copy.dim(0), rows);
  return copy.dim(0);
}

void check_result(const Exec& exec, const char* op, const Tensor& t, bool only_f32) {
  NRL_CHECK(t.rank == 2 && (t.data || t.numel() == 0) && dense_rows(t) &&
                (only_f32 ? t.dtype == DType::f32 && t.contiguous() : is_f32_or_bf16(t)),
            "{}: the result is {}", op, describe(t));
  NRL_CHECK(only_f32 || !exec.libraries || t.dtype == DType::bf16,
            "{}: the result is {}, but a GPU has kernels for bf16 only", op, describe(t));
}

/// A GPU's tensor cores that hopper_fp8.cuh does not serve multiply FP8 operands as f16 (fp8.cuh).
bool multiplies_as_f16(const Exec& exec, const Tensor& operand) {
  return exec.libraries && is_fp8(operand) &&
         !(exec.device && exec.device->properties().major == 9 && exec.device->properties().minor == 0);
}

Cost grouped_cost(const Exec& exec, const Tensor& offsets, const Tensor& left, const Tensor& right,
                  const Tensor& result, int64_t rows, int64_t m, int64_t k, bool accumulate) {
  const double accumulated = accumulate ? bytes_of(result) : 0;
  return {.work = Work::gemm,
          .read = bytes_of(left, right) + accumulated,
          .written = bytes_of(result),
          .flops = linear_flops(rows, m, k),
          .operands = multiplies_as_f16(exec, left) ? DType::f16 : left.dtype,
          .gemm = {rows, m, k},
          .epilogue = accumulated + bytes_of(result),
          .groups = offsets.dim(0) - 1};
}

}  // namespace

Cost cost(const Exec& exec, const GroupedLinearForward& a) {
  return grouped_cost(exec, a.offsets, a.x, a.weight, a.out, a.out.dim(0), a.out.dim(1), a.x.dim(1), false);
}
Cost cost(const Exec& exec, const GroupedLinearBackwardData& a) {
  return grouped_cost(exec, a.offsets, a.dout, a.weight, a.dx, a.dx.dim(0), a.dx.dim(1), a.dout.dim(1),
                      false);
}
Cost cost(const Exec& exec, const GroupedLinearBackwardWeight& a) {
  const int rows = is_fp8(a.x) ? 1 : 0;
  return grouped_cost(exec, a.offsets, a.dout, a.x, a.dweight, a.x.dim(rows), a.dout.dim(1 - rows),
                      a.x.dim(1 - rows), a.accumulate);
}

void grouped_linear_forward(Exec& exec, const GroupedLinearForward& a) {
  refuse_on_gpu(exec, a.x, a.weight);
  if (noted(exec, Kernel::grouped_linear_forward, a)) return;
  constexpr const char* op = "grouped_linear_forward";
  if (is_fp8(a.x)) {
    check_result(exec, op, a.out, false);
    check_fp8(op, a.offsets, a.x, copied_rows(op, a.x, a.offsets, a.out.dim(0)), a.x.dim(1), a.weight,
              (a.offsets.dim(0) - 1) * a.out.dim(1), a.x.dim(1));
  } else {
    check(op, a.out, a.x, a.offsets, a.weight, a.x.dtype);
  }
  const trace::Range range = traced(exec, Kernel::grouped_linear_forward, a);
  if (a.out.numel() > 0) exec.kernels->grouped_linear_forward(exec, a);
}

void grouped_linear_backward_data(Exec& exec, const GroupedLinearBackwardData& a) {
  refuse_on_gpu(exec, a.dout, a.weight);
  if (noted(exec, Kernel::grouped_linear_backward_data, a)) return;
  constexpr const char* op = "grouped_linear_backward_data";
  if (is_fp8(a.dout)) {
    check_result(exec, op, a.dx, false);
    check_fp8(op, a.offsets, a.dout, copied_rows(op, a.dout, a.offsets, a.dx.dim(0)), a.dout.dim(1), a.weight,
              (a.offsets.dim(0) - 1) * a.dx.dim(1), a.dout.dim(1));
  } else {
    check(op, a.dout, a.dx, a.offsets, a.weight, a.dx.dtype);
  }
  const trace::Range range = traced(exec, Kernel::grouped_linear_backward_data, a);
  if (a.dx.numel() > 0) exec.kernels->grouped_linear_backward_data(exec, a);
}

void grouped_linear_backward_weight(Exec& exec, const GroupedLinearBackwardWeight& a) {
  refuse_on_gpu(exec, a.dout, a.x);
  if (noted(exec, Kernel::grouped_linear_backward_weight, a)) return;
  constexpr const char* op = "grouped_linear_backward_weight";
  if (is_fp8(a.dout)) {
    check_result(exec, op, a.dweight, true);
    const int64_t m = a.dweight.dim(0) / (a.offsets.dim(0) - 1), rows = a.x.dim(1);
    check_fp8(op, a.offsets, a.dout, m, rows, a.x, a.dweight.dim(1), rows);
  } else {
    check(op, a.dout, a.x, a.offsets, a.dweight, DType::f32);
  }
  const trace::Range range = traced(exec, Kernel::grouped_linear_backward_weight, a);
  exec.kernels->grouped_linear_backward_weight(exec, a);
}

namespace {

size_t workspace_of(const Exec& exec, int64_t n, int64_t m, int64_t k, DType dtype) {
  return exec.on_gpu() ? 0
                       : grouped_linear_workspace(n, m, k, dtype, exec.threads, exec.kernels->bf16_products);
}

}  // namespace

size_t workspace(const Exec& exec, const GroupedLinearForward& a) {
  return workspace_of(exec, a.out.dim(0), a.out.dim(1), a.x.dim(1), gemm_type(a.x, a.weight, a.out));
}

size_t workspace(const Exec& exec, const GroupedLinearBackwardData& a) {
  const int64_t n = a.dx.dim(0), m = a.dout.dim(1), k = a.dx.dim(1);
  const DType dtype = gemm_type(a.dout, a.weight, a.dx);
  return is_fp8(a.dout) ? workspace_of(exec, n, k, m, dtype) : workspace_of(exec, n, m, k, dtype);
}

size_t workspace(const Exec& exec, const GroupedLinearBackwardWeight& a) {
  const int64_t experts = a.offsets.dim(0) - 1, m = a.dweight.dim(0) / experts, k = a.dweight.dim(1);
  const DType dtype = gemm_type(a.dout, a.x, a.dweight);
  if (!is_fp8(a.dout)) return workspace_of(exec, a.dout.dim(0), m, k, dtype);
  // The copies have a unit of padding for each of the other experts (group_begin()).
  return workspace_of(exec, m, k, a.x.dim(1) - (experts - 1) * row_unit(a.x.scales.kind), dtype);
}

size_t grouped_linear_workspace(int64_t n, int64_t m, int64_t k, DType dtype, int threads,
                                Bf16Products products) {
  const size_t each = linear_workspace(n, m, k, dtype, 1, products);
  return static_cast<size_t>(std::max(threads, 1)) * scratch_bytes(static_cast<int64_t>(each), 1) +
         scratch_alignment;
}

}  // namespace nrl::ops
