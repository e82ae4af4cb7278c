#include "core/ops/optimizer/optimizer.h"

#include "core/ops/check.h"
#include "core/ops/kernel_table.h"
#include "core/trace/trace.h"

namespace nrl::ops {
namespace {

void check_flat(const char* op, const char* name, const Tensor& t) {
  NRL_CHECK((t.data || t.numel() == 0) && is_float(t) && t.contiguous(),
            "{}: {} is {}, wanted contiguous f32 or bf16", op, name, describe(t));
}

}  // namespace

void adamw(Exec& exec, const AdamW& a) {
  const int64_t n = a.param.numel();
  for (const Tensor* t : {&a.param, &a.grad, &a.exp_avg, &a.exp_avg_sq}) {
    NRL_CHECK(is_vector(*t, n, DType::f32), "adamw: {} where f32[{}] is wanted", describe(*t), n);
  }
  NRL_CHECK(!a.param_low || is_vector(a.param_low, n, DType::bf16), "adamw: param_low is {}",
            describe(a.param_low));
  NRL_CHECK(a.step >= 1 && a.beta1 >= 0 && a.beta1 < 1 && a.beta2 >= 0 && a.beta2 < 1 && a.eps >= 0,
            "adamw: step {}, betas {} {}, eps {}", a.step, a.beta1, a.beta2, a.eps);
  const trace::Range range("adamw");
  if (n > 0) exec.kernels->adamw(exec, a);
}

double sum_of_squares(Exec& exec, const Tensor& x) {
  check_flat("sum_of_squares", "x", x);
  const trace::Range range("sum_of_squares");
  return x.numel() > 0 ? exec.kernels->sum_of_squares(exec, x) : 0.0;
}

void add(Exec& exec, const Tensor& x, const Tensor& out) {
  check_flat("add", "x", x);
  check_flat("add", "out", out);
  NRL_CHECK(x.numel() == out.numel() && same_or_disjoint(x, out), "add: x is {}, out is {}", describe(x),
            describe(out));
  const trace::Range range("add");
  if (x.numel() > 0) exec.kernels->add(exec, x, out);
}

void convert(Exec& exec, const Tensor& x, const Tensor& out) {
  check_flat("convert", "x", x);
  check_flat("convert", "out", out);
  NRL_CHECK(x.numel() == out.numel() && same_or_disjoint(x, out), "convert: x is {}, out is {}", describe(x),
            describe(out));
  const trace::Range range("convert");
  if (x.numel() > 0) exec.kernels->convert(exec, x, out);
}

void zero(Exec& exec, const Tensor& x) {
  NRL_CHECK((x.data || x.numel() == 0) && x.contiguous(), "zero: x is {}, wanted contiguous memory",
            describe(x));
  const trace::Range range("zero");
  if (x.numel() > 0) exec.kernels->zero(exec, x);
}

}  // namespace nrl::ops
