#include "tests/reference/attention.h"

#include <algorithm>
#include <cmath>

namespace reference {
namespace {

// First token that token t sees; `window` 0: all before it.
size_t first_visible(size_t window, const Layout& layout, size_t t) {
  return std::max(layout.first[t], window > 0 && t + 1 > window ? t + 1 - window : 0);
}

double attention_scale(const Config& c) {
  return 1 / std::sqrt(c.query_scalar > 0 ? c.query_scalar : static_cast<double>(c.head_dim));
}

}  // namespace

Attention attention(const Config& c, size_t window, const Layout& layout, const Tensor& q, const Tensor& k,
                    const Tensor& v) {
  const size_t n = q.rows, d = c.head_dim, group = c.heads / c.kv_heads;
  Attention a{std::vector<Tensor>(c.heads, Tensor(n, n)), zeros_like(q)};
  const double scale = attention_scale(c);
  for (size_t h = 0; h < c.heads; ++h) {
    const size_t q0 = h * d, k0 = h / group * d;  // the queries of a group share keys and values
    Tensor& p = a.p[h];
    for (size_t t = 0; t < n; ++t) {
      double largest = -INFINITY, sum = 0;
      for (size_t s = first_visible(window, layout, t); s <= t; ++s) {
        for (size_t i = 0; i < d; ++i) p(t, s) += scale * q(t, q0 + i) * k(s, k0 + i);
        largest = std::max(largest, p(t, s));
      }
      for (size_t s = first_visible(window, layout, t); s <= t; ++s)
        sum += p(t, s) = std::exp(p(t, s) - largest);
      for (size_t s = first_visible(window, layout, t); s <= t; ++s) {
        p(t, s) /= sum;
        for (size_t i = 0; i < d; ++i) a.out(t, q0 + i) += p(t, s) * v(s, k0 + i);
      }
    }
  }
  return a;
}

// Softmax: dscore = p * (dp - sum(p * dp)).
void attention_backward(const Config& c, size_t window, const Layout& layout, const Tensor& dout,
                        const Attention& a, const Tensor& q, const Tensor& k, const Tensor& v, Tensor& dq,
                        Tensor& dk, Tensor& dv) {
  const size_t n = q.rows, d = c.head_dim, group = c.heads / c.kv_heads;
  const double scale = attention_scale(c);
  for (size_t h = 0; h < c.heads; ++h) {
    const size_t q0 = h * d, k0 = h / group * d;
    const Tensor& p = a.p[h];
    for (size_t t = 0; t < n; ++t) {
      std::vector<double> dp(n, 0.0);
      double dot = 0;
      for (size_t s = first_visible(window, layout, t); s <= t; ++s) {
        for (size_t i = 0; i < d; ++i) {
          dp[s] += dout(t, q0 + i) * v(s, k0 + i);
          dv(s, k0 + i) += p(t, s) * dout(t, q0 + i);
        }
        dot += p(t, s) * dp[s];
      }
      for (size_t s = first_visible(window, layout, t); s <= t; ++s) {
        const double dscore = p(t, s) * (dp[s] - dot) * scale;
        for (size_t i = 0; i < d; ++i) {
          dq(t, q0 + i) += dscore * k(s, k0 + i);
          dk(s, k0 + i) += dscore * q(t, q0 + i);
        }
      }
    }
  }
}

}  // namespace reference
