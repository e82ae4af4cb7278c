#include "core/ops/activation.h"

#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

void check(const char* op, const Tensor& x, const Tensor& out_like, const Tensor& x_like, bool gated) {
  NRL_CHECK(x.data && x.rank == 2 && is_float(x) && dense_rows(x),
            "{}: x is {}, wanted f32, bf16 or f16 of rank 2", op, describe(x));
  NRL_CHECK(out_like.data && out_like.rank == 2 && out_like.dtype == x.dtype && dense_rows(out_like) &&
                out_like.dim(0) == x.dim(0) && x.dim(1) == out_like.dim(1) * (gated ? 2 : 1),
            "{}: out is {}, x is {}, {}", op, describe(out_like), describe(x), gated ? "gated" : "plain");
  NRL_CHECK(x_like.data && same_shape(x_like, x) && x_like.dtype == x.dtype && dense_rows(x_like),
            "{}: dx is {}, x is {}", op, describe(x_like), describe(x));
}

}  // namespace

Cost cost(const Exec&, const ActivationForward& a) {
  return {.read = bytes_of(a.x), .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const ActivationBackward& a) {
  return {.read = bytes_of(a.dout, a.x), .written = bytes_of(a.dx, a.out)};
}

void activation_forward(Exec& exec, const ActivationForward& a) {
  if (noted(exec, Kernel::activation_forward, a)) return;
  check("activation_forward", a.x, a.out, a.x, a.gated);
  NRL_CHECK(same_or_disjoint(a.out, a.gated ? a.x.columns(0, a.out.dim(1)) : a.x),
            "activation_forward: out overlaps x partly");
  const trace::Range range = traced(exec, Kernel::activation_forward, a);
  if (a.out.numel() > 0) exec.kernels->activation_forward(exec, a);
}

void activation_backward(Exec& exec, const ActivationBackward& a) {
  if (noted(exec, Kernel::activation_backward, a)) return;
  check("activation_backward", a.x, a.dout, a.dx, a.gated);
  NRL_CHECK(same_or_disjoint(a.dx, a.x), "activation_backward: dx overlaps x partly");
  NRL_CHECK(same_or_disjoint(a.gated ? a.dx.columns(0, a.dout.dim(1)) : a.dx, a.dout),
            "activation_backward: dx overlaps dout partly");
  if (a.out) {
    check("activation_backward", a.x, a.out, a.dx, a.gated);
    NRL_CHECK(same_or_disjoint(a.out, a.dout) && a.out.data != a.x.data && same_or_disjoint(a.out, a.x) &&
                  a.out.data != a.dx.data && same_or_disjoint(a.out, a.dx),
              "activation_backward: out overlaps dout partly, or x or dx");
  }
  const trace::Range range = traced(exec, Kernel::activation_backward, a);
  if (a.dout.numel() > 0) exec.kernels->activation_backward(exec, a);
}

}  // namespace nrl::ops
