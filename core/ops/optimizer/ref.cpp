#include <cstring>

#include "core/ops/ref.h"

namespace nrl::ops::reference {
namespace {

void update(Exec&, const AdamW& a) {
  const double lr = static_cast<double>(a.lr), b1 = static_cast<double>(a.beta1),
               b2 = static_cast<double>(a.beta2);
  const double steps = static_cast<double>(a.step);
  for (int64_t i = 0; i < a.param.numel(); ++i) {
    const double g = load(a.grad, i) * static_cast<double>(a.grad_scale);
    const double m = b1 * load(a.exp_avg, i) + (1.0 - b1) * g;
    const double v = b2 * load(a.exp_avg_sq, i) + (1.0 - b2) * g * g;
    double p = load(a.param, i);
    p -= lr * static_cast<double>(a.weight_decay) * p;
    p -= lr * (m / (1.0 - std::pow(b1, steps))) /
         (std::sqrt(v / (1.0 - std::pow(b2, steps))) + static_cast<double>(a.eps));
    store(a.param, i, p);
    store(a.exp_avg, i, m);
    store(a.exp_avg_sq, i, v);
    if (a.param_low) store(a.param_low, i, p);
    if (a.zero_grad) store(a.grad, i, 0.0);
  }
}

double squares(Exec&, const Tensor& x) {
  double s = 0;
  for (int64_t i = 0; i < x.numel(); ++i) s += load_at(x, i) * load_at(x, i);
  return s;
}

void add_to(Exec&, const Tensor& x, const Tensor& out) {
  for (int64_t i = 0; i < x.numel(); ++i) store_at(out, i, load_at(out, i) + load_at(x, i));
}

void convert_to(Exec&, const Tensor& x, const Tensor& out) {
  for (int64_t i = 0; i < x.numel(); ++i) store_at(out, i, load_at(x, i));
}

void clear(Exec&, const Tensor& x) {
  std::memset(x.data, 0, static_cast<size_t>(x.bytes()));
}

}  // namespace

void fill_optimizer(KernelTable& table) {
  table.adamw = update;
  table.sum_of_squares = squares;
  table.add = add_to;
  table.convert = convert_to;
  table.zero = clear;
}

}  // namespace nrl::ops::reference
