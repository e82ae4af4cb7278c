#include "core/ops/shared/reference.h"

namespace nrl::ops::reference {
namespace {

constexpr double pi = 3.14159265358979323846;

double value(Activation kind, double x) {
  switch (kind) {
    case Activation::silu:
      return x / (1.0 + std::exp(-x));
    case Activation::gelu_tanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / pi) * (x + 0.044715 * x * x * x)));
    case Activation::gelu_erf:
      return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0)));
    case Activation::none:
      break;
  }
  return x;
}

double slope(Activation kind, double x) {
  switch (kind) {
    case Activation::silu: {
      const double s = 1.0 / (1.0 + std::exp(-x));
      return s * (1.0 + x * (1.0 - s));
    }
    case Activation::gelu_tanh: {
      const double t = std::tanh(std::sqrt(2.0 / pi) * (x + 0.044715 * x * x * x));
      return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * std::sqrt(2.0 / pi) * (1.0 + 3.0 * 0.044715 * x * x);
    }
    case Activation::gelu_erf:
      return 0.5 * (1.0 + std::erf(x / std::sqrt(2.0))) + x * std::exp(-0.5 * x * x) / std::sqrt(2.0 * pi);
    case Activation::none:
      break;
  }
  return 1.0;
}

void forward(Exec&, const ActivationForward& a) {
  const int64_t f = a.out.dim(1);
  for (int64_t r = 0; r < a.out.dim(0); ++r) {
    for (int64_t i = 0; i < f; ++i) {
      store(a.out, r, i, value(a.kind, load(a.x, r, i)) * (a.gated ? load(a.x, r, f + i) : 1.0));
    }
  }
}

void backward(Exec&, const ActivationBackward& a) {
  const int64_t f = a.dout.dim(1);
  for (int64_t r = 0; r < a.dout.dim(0); ++r) {
    for (int64_t i = 0; i < f; ++i) {
      const double g = load(a.dout, r, i), x = load(a.x, r, i), up = a.gated ? load(a.x, r, f + i) : 1.0;
      store(a.dx, r, i, g * up * slope(a.kind, x));
      if (a.gated) store(a.dx, r, f + i, g * value(a.kind, x));
    }
  }
}

}  // namespace

void fill_activation(KernelTable& table) {
  table.activation_forward = forward;
  table.activation_backward = backward;
}

}  // namespace nrl::ops::reference
