#include "tests/reference/experts.h"

#include <algorithm>
#include <cmath>

namespace reference {
namespace {

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

Tensor mlp_forward(const Tensors& w, const std::string& at, const Tensor& x, GatedMlp& m) {
  m.x = x;
  m.gate = linear(x, w.at(at + "gate.weight"), nullptr);
  m.up = linear(x, w.at(at + "up.weight"), nullptr);
  m.hidden = m.up;
  for (size_t i = 0; i < m.hidden.size(); ++i) m.hidden[i] *= m.gate[i] * sigmoid(m.gate[i]);
  return linear(m.hidden, w.at(at + "down.weight"), nullptr);
}

Tensor mlp_backward(const Tensors& w, const std::string& at, const Tensor& dy, const GatedMlp& m,
                    Tensors& g) {
  const auto back = [&](const std::string& name, const Tensor& d, const Tensor& x) {
    return linear_backward(d, x, w.at(at + name), g.at(at + name), nullptr);
  };
  const Tensor dhidden = back("down.weight", dy, m.hidden);
  Tensor dgate = dhidden, dup = dhidden;
  for (size_t i = 0; i < dup.size(); ++i) {
    const double s = sigmoid(m.gate[i]);
    dup[i] *= m.gate[i] * s;
    dgate[i] *= m.up[i] * (s + m.gate[i] * s * (1 - s));
  }
  Tensor dx = back("up.weight", dup, m.x);
  add(dx, back("gate.weight", dgate, m.x));
  return dx;
}

double log_sum_exp(const Tensor& t, size_t row) {
  double sum = 0;
  for (size_t i = 0; i < t.columns; ++i) sum += std::exp(t(row, i));
  return std::log(sum);
}

}  // namespace

Tensor experts_forward(const Experts& e, const Tensors& w, const std::string& at, const Tensor& x,
                       ExpertLayer& l) {
  l.logits = linear(x, w.at(at + "router.weight"), nullptr);
  l.probability = l.weight = zeros_like(l.logits);
  l.tokens.resize(e.count);
  for (size_t t = 0; t < x.rows; ++t) {
    const double lse = log_sum_exp(l.logits, t);
    std::vector<size_t> order(e.count);
    for (size_t i = 0; i < e.count; ++i) {
      order[i] = i;
      l.probability(t, i) = std::exp(l.logits(t, i) - lse);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return l.logits(t, a) > l.logits(t, b); });
    order.resize(e.chosen);
    double sum = 0;
    for (const size_t i : order) sum += l.probability(t, i);
    for (const size_t i : order) {
      l.weight(t, i) = l.probability(t, i) / (e.normalize ? sum : 1);
      l.tokens[i].push_back(t);
    }
    l.chosen.push_back(order);
  }
  Tensor y = zeros_like(x);
  l.experts.resize(e.count);
  for (size_t i = 0; i < e.count; ++i) {
    Tensor own(l.tokens[i].size(), x.columns);
    for (size_t r = 0; r < own.rows; ++r)
      for (size_t c = 0; c < x.columns; ++c) own(r, c) = x(l.tokens[i][r], c);
    l.out.push_back(mlp_forward(w, at + "expert." + std::to_string(i) + ".", own, l.experts[i]));
    for (size_t r = 0; r < own.rows; ++r)
      for (size_t c = 0; c < x.columns; ++c)
        y(l.tokens[i][r], c) += l.weight(l.tokens[i][r], i) * l.out[i](r, c);
  }
  if (e.shared_ffn == 0) return y;
  l.shared_out = mlp_forward(w, at + "shared.", x, l.shared);
  l.shared_gate = linear(x, w.at(at + "shared_gate.weight"), nullptr);
  for (double& v : l.shared_gate.values) v = sigmoid(v);
  for (size_t t = 0; t < x.rows; ++t)
    for (size_t c = 0; c < x.columns; ++c) y(t, c) += l.shared_gate[t] * l.shared_out(t, c);
  return y;
}

Tensor experts_backward(const Experts& e, const Tensors& w, const std::string& at, const Tensor& x,
                        const Tensor& dy, const ExpertLayer& l, double router_scale, Tensors& g) {
  const auto tokens = static_cast<double>(x.rows);
  Tensor dx = zeros_like(x), dweight = zeros_like(l.weight), dlogits = zeros_like(l.weight);
  for (size_t i = 0; i < e.count; ++i) {
    Tensor own(l.tokens[i].size(), x.columns);
    for (size_t r = 0; r < own.rows; ++r)
      for (size_t c = 0; c < x.columns; ++c) {
        const size_t t = l.tokens[i][r];
        own(r, c) = l.weight(t, i) * dy(t, c);
        dweight(t, i) += dy(t, c) * l.out[i](r, c);
      }
    const Tensor back = mlp_backward(w, at + "expert." + std::to_string(i) + ".", own, l.experts[i], g);
    for (size_t r = 0; r < own.rows; ++r)
      for (size_t c = 0; c < x.columns; ++c) dx(l.tokens[i][r], c) += back(r, c);
  }
  const double aux = router_scale * e.aux_loss * static_cast<double>(e.count) /
                     (static_cast<double>(e.chosen) * tokens * tokens);
  for (size_t t = 0; t < x.rows; ++t) {
    // Of the probabilities.
    std::vector<double> dp(e.count);
    double sum = 0, weighted = 0, mean = 0;
    for (const size_t i : l.chosen[t]) {
      sum += l.probability(t, i);
      weighted += l.weight(t, i) * dweight(t, i);
    }
    for (const size_t i : l.chosen[t]) dp[i] = e.normalize ? (dweight(t, i) - weighted) / sum : dweight(t, i);
    for (size_t i = 0; i < e.count; ++i) {
      dp[i] += aux * static_cast<double>(l.tokens[i].size());
      mean += l.probability(t, i) * dp[i];
    }
    const double z = router_scale * e.z_loss * 2 * log_sum_exp(l.logits, t) / tokens;
    for (size_t i = 0; i < e.count; ++i) dlogits(t, i) = l.probability(t, i) * (dp[i] - mean + z);
  }
  add(dx, linear_backward(dlogits, x, w.at(at + "router.weight"), g.at(at + "router.weight"), nullptr));
  if (e.shared_ffn == 0) return dx;
  Tensor dshared = dy, dgate = zeros_like(l.shared_gate);
  for (size_t t = 0; t < x.rows; ++t) {
    const double s = l.shared_gate[t];
    for (size_t c = 0; c < x.columns; ++c) {
      dgate[t] += dy(t, c) * l.shared_out(t, c) * s * (1 - s);
      dshared(t, c) *= s;
    }
  }
  add(dx, mlp_backward(w, at + "shared.", dshared, l.shared, g));
  add(dx,
      linear_backward(dgate, x, w.at(at + "shared_gate.weight"), g.at(at + "shared_gate.weight"), nullptr));
  return dx;
}

double router_loss(const Experts& e, const ExpertLayer& l) {
  const auto tokens = static_cast<double>(l.logits.rows);
  double aux = 0, z = 0;
  for (size_t i = 0; i < e.count; ++i) {
    double sum = 0;
    for (size_t t = 0; t < l.logits.rows; ++t) sum += l.probability(t, i);
    aux += static_cast<double>(l.tokens[i].size()) * sum;
  }
  for (size_t t = 0; t < l.logits.rows; ++t) z += std::pow(log_sum_exp(l.logits, t), 2) / tokens;
  return e.aux_loss * static_cast<double>(e.count) * aux / (static_cast<double>(e.chosen) * tokens * tokens) +
         e.z_loss * z;
}

}  // namespace reference
