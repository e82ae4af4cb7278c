#include "core/ops/shared/check.h"
#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

/// out(i, j) = f(sum over p of x(i, p) * y(p, j) + bias(j)), or added to out, or times `scale`.
void multiply(const Matrix& x, const Matrix& y, const Tensor& out, bool accumulate, const Tensor& bias = {},
              Activation activation = Activation::none, float scale = 1) {
  std::vector<double> sums(static_cast<size_t>(y.cols));
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < y.cols; ++j)
      sums[j] = (accumulate ? load(out, i, j) : 0.0) + (bias ? load(bias, j) : 0.0);
    add_products(sums, x.at(i), y);
    for (int64_t j = 0; j < y.cols; ++j)
      store(out, i, j, static_cast<double>(scale) * activation_value(activation, sums[j]));
  }
}

void forward(Exec&, const LinearForward& a) {
  multiply(Matrix(a.x), Matrix(a.weight).transposed(), a.out, a.accumulate, a.bias, a.activation, a.scale);
}

// FP8 operands are stored with the summed dimension last.
void backward_data(Exec&, const LinearBackwardData& a) {
  const Matrix weight(a.weight);
  multiply(Matrix(a.dout), is_fp8(a.dout) ? weight.transposed() : weight, a.dx, a.accumulate, {},
           Activation::none, a.scale);
}

void backward_weight(Exec&, const LinearBackwardWeight& a) {
  const Matrix dout(a.dout), x(a.x);
  if (is_fp8(a.dout))
    multiply(dout, x.transposed(), a.dweight, a.accumulate);
  else
    multiply(dout.transposed(), x, a.dweight, a.accumulate);
}

void column_sums_of(Exec&, const ColumnSums& a) {
  for (int64_t j = 0; j < a.x.dim(1); ++j) {
    double sum = a.accumulate ? load(a.out, j) : 0.0;
    for (int64_t i = 0; i < a.x.dim(0); ++i) sum += load(a.x, i, j);
    store(a.out, j, sum);
  }
}

}  // namespace

void fill_linear(KernelTable& table) {
  table.linear_forward = forward;
  table.linear_backward_data = backward_data;
  table.linear_backward_weight = backward_weight;
  table.column_sums = column_sums_of;
}

}  // namespace nrl::ops::reference
