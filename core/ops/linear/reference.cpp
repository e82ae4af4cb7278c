#include "core/ops/shared/reference.h"

#include "core/ops/shared/check.h"

namespace nrl::ops::reference {
namespace {

void forward(const LinearForward& a) {
  for (int64_t i = 0; i < a.out.dim(0); ++i)
    for (int64_t j = 0; j < a.out.dim(1); ++j) {
      double sum = a.accumulate ? load(a.out, i, j) : 0.0;
      if (a.bias) sum += load(a.bias, j);
      for (int64_t p = 0; p < a.x.dim(1); ++p) sum += load(a.x, i, p) * load(a.weight, j, p);
      store(a.out, i, j, activation_value(a.activation, sum));
    }
}

void forward_kernel(Exec&, const LinearForward& a) {
  forward(a);
}

void backward_data(Exec&, const LinearBackwardData& a) {
  if (is_fp8(a.dout))
    return forward({.x = a.dout, .weight = a.weight, .out = a.dx, .accumulate = a.accumulate});
  for (int64_t i = 0; i < a.dx.dim(0); ++i)
    for (int64_t p = 0; p < a.dx.dim(1); ++p) {
      double sum = a.accumulate ? load(a.dx, i, p) : 0.0;
      for (int64_t j = 0; j < a.dout.dim(1); ++j) sum += load(a.dout, i, j) * load(a.weight, j, p);
      store(a.dx, i, p, sum);
    }
}

void backward_weight(Exec&, const LinearBackwardWeight& a) {
  if (is_fp8(a.dout))
    return forward({.x = a.dout, .weight = a.x, .out = a.dweight, .accumulate = a.accumulate});
  for (int64_t j = 0; j < a.dweight.dim(0); ++j)
    for (int64_t p = 0; p < a.dweight.dim(1); ++p) {
      double sum = a.accumulate ? load(a.dweight, j, p) : 0.0;
      for (int64_t i = 0; i < a.dout.dim(0); ++i) sum += load(a.dout, i, j) * load(a.x, i, p);
      store(a.dweight, j, p, sum);
    }
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
  table.linear_forward = forward_kernel;
  table.linear_backward_data = backward_data;
  table.linear_backward_weight = backward_weight;
  table.column_sums = column_sums_of;
}

}  // namespace nrl::ops::reference
