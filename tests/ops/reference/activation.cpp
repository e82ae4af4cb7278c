#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

void forward(Exec&, const ActivationForward& a) {
  const int64_t f = a.out.dim(1);
  for (int64_t r = 0; r < a.out.dim(0); ++r) {
    for (int64_t i = 0; i < f; ++i) {
      store(a.out, r, i, activation_value(a.kind, load(a.x, r, i)) * (a.gated ? load(a.x, r, f + i) : 1.0));
    }
  }
}

void backward(Exec&, const ActivationBackward& a) {
  const int64_t f = a.dout.dim(1);
  for (int64_t r = 0; r < a.dout.dim(0); ++r) {
    for (int64_t i = 0; i < f; ++i) {
      const double g = load(a.dout, r, i), x = load(a.x, r, i), up = a.gated ? load(a.x, r, f + i) : 1.0;
      store(a.dx, r, i, g * up * activation_slope(a.kind, x));
      if (a.gated) store(a.dx, r, f + i, g * activation_value(a.kind, x));
      if (a.out) store(a.out, r, i, activation_value(a.kind, x) * up);
    }
  }
}

}  // namespace

void fill_activation(KernelTable& table) {
  table.activation_forward = forward;
  table.activation_backward = backward;
}

}  // namespace nrl::ops::reference
