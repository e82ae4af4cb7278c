#pragma once
// A matrix of doubles and the few operations that a decoder is made of, written as their formulas.

#include <cmath>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace reference {

/// A row-major matrix. A vector of n values has one row.
struct Tensor {
  size_t rows = 0, columns = 0;
  std::vector<double> values;

  Tensor() = default;
  Tensor(size_t r, size_t c) : rows(r), columns(c), values(r * c, 0.0) {}
  double& operator()(size_t r, size_t c) { return values[r * columns + c]; }
  double operator()(size_t r, size_t c) const { return values[r * columns + c]; }
  double& operator[](size_t i) { return values[i]; }
  double operator[](size_t i) const { return values[i]; }
  size_t size() const { return values.size(); }
};

/// Tensors by name: weights, their gradients, and what the optimizer keeps of them.
using Tensors = std::map<std::string, Tensor>;

inline Tensor zeros_like(const Tensor& t) {
  return {t.rows, t.columns};
}
inline Tensors zeros_like(const Tensors& all) {
  Tensors zeros;
  for (const auto& [name, t] : all) zeros[name] = zeros_like(t);
  return zeros;
}

inline void add(Tensor& to, const Tensor& t) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += t[i];
}

/// y = x W^T + b, with W as (out, in); b may be null.
inline Tensor linear(const Tensor& x, const Tensor& w, const Tensor* b) {
  Tensor y(x.rows, w.rows);
  for (size_t r = 0; r < x.rows; ++r)
    for (size_t o = 0; o < w.rows; ++o) {
      double sum = b ? (*b)[o] : 0.0;
      for (size_t i = 0; i < w.columns; ++i) sum += x(r, i) * w(o, i);
      y(r, o) = sum;
    }
  return y;
}

/// Adds dW = dy^T x and db = sum of the rows of dy; returns dx = dy W.
inline Tensor linear_backward(const Tensor& dy, const Tensor& x, const Tensor& w, Tensor& dw, Tensor* db) {
  Tensor dx = zeros_like(x);
  for (size_t r = 0; r < x.rows; ++r)
    for (size_t o = 0; o < w.rows; ++o) {
      const double d = dy(r, o);
      if (db) (*db)[o] += d;
      for (size_t i = 0; i < w.columns; ++i) {
        dw(o, i) += d * x(r, i);
        dx(r, i) += d * w(o, i);
      }
    }
  return dx;
}

}  // namespace reference
