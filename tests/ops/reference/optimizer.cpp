#include <cstring>

#include "core/ops/optimizer/decide_step.h"
#include "core/ops/shared/moments.h"
#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

// A moment's block from `at` on as it is in memory, and back to nearest.
std::vector<double> read_block(const Tensor& t, const Tensor& scales, int64_t at, int64_t n) {
  std::vector<float> x(static_cast<size_t>(n));
  decode_moments(t.dtype, static_cast<char*>(t.data) + at * size_of(t.dtype),
                 scales ? static_cast<uint8_t*>(scales.data) + at / moment_block : nullptr, 0, n, x.data());
  return {x.begin(), x.end()};
}

void write_block(const Tensor& t, const Tensor& scales, int64_t at, const std::vector<double>& values) {
  const std::vector<float> x(values.begin(), values.end());
  encode_moments(t.dtype, x.data(), static_cast<int64_t>(x.size()),
                 static_cast<char*>(t.data) + at * size_of(t.dtype),
                 scales ? static_cast<uint8_t*>(scales.data) + at / moment_block : nullptr);
}

void update_range(const AdamW& a, int64_t flat, int64_t state, int64_t count, const AdamWRates& rates) {
  const double b1 = static_cast<double>(a.beta1), b2 = static_cast<double>(a.beta2);
  const double steps = static_cast<double>(a.step);
  double lr = static_cast<double>(a.lr), grad_scale = static_cast<double>(a.grad_scale);
  double correction1 = 1.0 - std::pow(b1, steps), correction2 = 1.0 - std::pow(b2, steps);
  bool skip = false;
  if (a.scalars) {
    lr = load(a.scalars, StepScalar::learning_rate);
    grad_scale = load(a.scalars, StepScalar::grad_scale);
    correction1 = load(a.scalars, StepScalar::correction1);
    correction2 = load(a.scalars, StepScalar::correction2);
    skip = load(a.scalars, StepScalar::skip) != 0.0;
  }
  lr *= static_cast<double>(rates.lr_scale);
  if (skip) return;
  for (int64_t at = 0; at < count; at += moment_block) {
    const int64_t n = std::min(moment_block, count - at);
    std::vector<double> means = read_block(a.exp_avg, a.exp_avg_scales, state + at, n);
    std::vector<double> squares = read_block(a.exp_avg_sq, a.exp_avg_sq_scales, state + at, n);
    for (int64_t k = 0; k < n; ++k) {
      const int64_t i = at + k, param_index = a.param_bf16 ? state + i : flat + i;
      const double g = load(a.grad, flat + i) * grad_scale;
      double& m = means[k];
      double& v = squares[k];
      m = b1 * m + (1.0 - b1) * g;
      v = b2 * v + (1.0 - b2) * g * g;
      auto* high = a.param_bf16 ? static_cast<uint16_t*>(a.param_bf16.data) + flat + i : nullptr;
      auto* low = a.remainder ? static_cast<uint16_t*>(a.remainder.data) + state + i : nullptr;
      double p = low ? static_cast<double>(moments::join({*high, *low})) : load(a.param, param_index);
      p -= lr * static_cast<double>(rates.weight_decay) * p;
      p -= lr * (m / correction1) / (std::sqrt(v / correction2) + static_cast<double>(a.eps));
      const moments::Split bits = moments::split(static_cast<float>(p));
      if (low)
        *low = bits.low;
      else
        store(a.param, param_index, p);
      if (high) *high = a.param_bf16.dtype == DType::f16 ? f16::round(static_cast<float>(p)) : bits.high;
    }
    write_block(a.exp_avg, a.exp_avg_scales, state + at, means);
    write_block(a.exp_avg_sq, a.exp_avg_sq_scales, state + at, squares);
  }
}

void update(Exec&, const AdamW& a) {
  if (!a.chunks) return update_range(a, 0, 0, a.grad.numel(), a.rates[0]);
  const auto* chunk = static_cast<const int64_t*>(a.chunks.data);
  for (int64_t c = 0; c < a.chunks.dim(0); ++c, chunk += 4)
    update_range(a, chunk[0], chunk[1], chunk[2], a.rates[chunk[3]]);
}

void add_squares(Exec&, const SumOfSquares& a) {
  double s = 0;
  for (int64_t i = 0; i < a.x.numel(); ++i) s += load_at(a.x, i) * load_at(a.x, i);
  store(a.out, 0, (a.accumulate ? load(a.out, 0) : 0.0) + s);
}

void add_sum_to(Exec&, const AddSum& a) {
  double s = 0;
  for (int64_t i = 0; i < a.x.numel(); ++i) s += load_at(a.x, i);
  store(a.out, 0, load(a.out, 0) + s);
}

void convert_to(Exec&, const Convert& a) {
  for (int64_t i = 0; i < a.x.numel(); ++i) store_at(a.out, i, load_at(a.x, i));
}

void sum_parts_to(Exec&, const SumParts& a) {
  const int64_t n = a.x.dim(1);
  for (int64_t i = 0; i < n; ++i) {
    double sum = a.accumulate ? load_at(a.out, i) : 0;
    for (int64_t p = 0; p < a.x.dim(0); ++p) sum += load_at(a.x, p * n + i);
    store_at(a.out, i, sum);
  }
}

void clear(Exec&, const Zero& a) {
  std::memset(a.x.data, 0, static_cast<size_t>(a.x.bytes()));
}

}  // namespace

void fill_optimizer(KernelTable& table) {
  table.adamw = update;
  table.add_sum_of_squares = add_squares;
  table.add_sum = add_sum_to;
  table.convert = convert_to;
  table.sum_parts = sum_parts_to;
  table.zero = clear;
  table.decide_step = [](Exec&, const DecideStep& a) {
    step::decide(static_cast<double*>(a.scalars.data), a.max_norm, a.beta1, a.beta2, a.max_skipped,
                 a.growth_interval);
  };
}

}  // namespace nrl::ops::reference
