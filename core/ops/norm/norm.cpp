#include "core/ops/norm.h"

#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

void check_operand(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  NRL_CHECK(t.data && same_shape(t, x) && t.dtype == x.dtype && is_float(t) && dense_rows(t),
            "{}: {} is {}, x is {}", op, name, describe(t), describe(x));
  NRL_CHECK(same_or_disjoint(t, x), "{}: {} overlaps x partly", op, name);
}

void check_weight(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  NRL_CHECK(t.data && are_float_pair(t, x) && is_vector(t, x.dim(-1), t.dtype),
            "{}: {} is {}, x is {}: wanted a vector, in f16 if x is", op, name, describe(t), describe(x));
}

void check_statistic(const char* op, const char* name, const Tensor& t, int64_t rows) {
  NRL_CHECK(is_vector(t, rows, DType::f32), "{}: {} is {}, wanted f32[{}]", op, name, describe(t), rows);
}

int64_t check_x(const char* op, const Tensor& x) {
  NRL_CHECK(x.data && is_float(x) && x.rank >= 1 && x.rank <= 3 && dense_rows(x) && x.dim(-1) > 0,
            "{}: x is {}, wanted f32, bf16 or f16 of rank 1 to 3 with contiguous last dimension", op,
            describe(x));
  return x.numel() / x.dim(-1);
}

}  // namespace

size_t norm_backward_workspace(int64_t d, int partials) {
  return static_cast<size_t>(partials) * 2 * static_cast<size_t>(d) * sizeof(float);
}

Cost cost(const Exec&, const NormForward& a) {
  const bool normalizes = a.out || a.amax;
  return {.read = bytes_of(a.x, a.residual) + (normalizes ? bytes_of(a.weight, a.bias) : 0.0),
          .written = bytes_of(a.sum, a.out, a.mean, a.rstd)};
}

Cost cost(const Exec& exec, const NormBackward& a) {
  const double gradients = bytes_of(a.dweight, a.dbias);
  return {.read = bytes_of(a.dout, a.x, a.weight, a.mean, a.rstd, a.dresidual) + gradients,
          .written = bytes_of(a.dx) + gradients,
          .scratch = 2 * exec.partials() * gradients,  // partial sums
          .launches = gradients > 0 ? 2 : 1};
}

size_t workspace(const Exec& exec, const NormBackward& a) {
  return norm_backward_workspace(a.x.dim(-1), exec.partials());
}

void norm_forward(Exec& exec, const NormForward& a) {
  if (noted(exec, Kernel::norm_forward, a)) return;
  constexpr const char* op = "norm_forward";
  const int64_t rows = check_x(op, a.x);
  if (a.out)
    check_operand(op, "out", a.out, a.x);
  else
    NRL_CHECK(a.rstd, "{}: neither out nor rstd", op);
  if (a.residual) {
    check_operand(op, "residual", a.residual, a.x);
    check_operand(op, "sum", a.sum, a.x);
    NRL_CHECK(same_or_disjoint(a.sum, a.residual), "{}: sum overlaps residual partly", op);
  } else {
    NRL_CHECK(!a.sum, "{}: sum without residual", op);
  }
  check_dropout(op, a.dropout, rows);
  NRL_CHECK(a.dropout.p == 0.0f || (a.residual && a.x.rank == 2), "{}: dropout of x {} {} residual", op,
            describe(a.x), a.residual ? "with" : "without");
  check_weight(op, "weight", a.weight, a.x);
  if (a.bias) check_weight(op, "bias", a.bias, a.x);
  NRL_CHECK(a.kind == NormKind::layer || (!a.bias && !a.mean), "{}: bias or mean with an RMS norm", op);
  NRL_CHECK(!a.bias || a.bias.dtype == a.weight.dtype, "{}: weight is {}, bias is {}", op, describe(a.weight),
            describe(a.bias));
  if (a.mean) check_statistic(op, "mean", a.mean, rows);
  if (a.rstd) check_statistic(op, "rstd", a.rstd, rows);
  if (a.amax) check_statistic(op, "amax", a.amax, 1);
  const trace::Range range = traced(exec, Kernel::norm_forward, a);
  if (rows > 0) exec.kernels->norm_forward(exec, a);
}

void norm_backward(Exec& exec, const NormBackward& a) {
  if (noted(exec, Kernel::norm_backward, a)) return;
  constexpr const char* op = "norm_backward";
  const int64_t rows = check_x(op, a.x), d = a.x.dim(-1);
  check_operand(op, "dout", a.dout, a.x);
  check_operand(op, "dx", a.dx, a.x);
  if (a.dresidual) check_operand(op, "dresidual", a.dresidual, a.x);
  NRL_CHECK(same_or_disjoint(a.dx, a.dout) && same_or_disjoint(a.dx, a.dresidual),
            "{}: dx overlaps dout or dresidual partly", op);
  check_weight(op, "weight", a.weight, a.x);
  check_statistic(op, "rstd", a.rstd, rows);
  if (a.kind == NormKind::layer) {
    check_statistic(op, "mean", a.mean, rows);
  } else {
    NRL_CHECK(!a.mean && !a.dbias, "{}: mean or dbias with an RMS norm", op);
  }
  if (a.amax) check_statistic(op, "amax", a.amax, 1);
  NRL_CHECK(!a.dweight || is_vector(a.dweight, d, DType::f32), "{}: dweight is {}", op, describe(a.dweight));
  NRL_CHECK(!a.dbias || is_vector(a.dbias, d, DType::f32), "{}: dbias is {}", op, describe(a.dbias));
  NRL_CHECK(exec.workspace.size >= workspace(exec, a), "{}: workspace of {} bytes, needs {}", op,
            exec.workspace.size, workspace(exec, a));
  const trace::Range range = traced(exec, Kernel::norm_backward, a);
  if (rows > 0) exec.kernels->norm_backward(exec, a);
}

}  // namespace nrl::ops
