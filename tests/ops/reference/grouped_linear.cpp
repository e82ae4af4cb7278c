#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

bool is_fp8(const Tensor& t) {
  return t.dtype == DType::e4m3 || t.dtype == DType::e5m2;
}

/// Where row r of expert e is in an operand.
int64_t place_of(const Tensor& t, const Tensor& offsets, int64_t e, int64_t r) {
  if (!is_fp8(t)) return r;
  const int64_t unit = has_scale_blocks(t.scales.kind) ? 128 : 16, begin = index(offsets, e);
  return (begin / unit + e) * unit + r - begin;
}

/// out(r, j) = sum over p of x(r, p) * w(p, j) for the rows of each expert, whose matrix is w(expert).
template <class Weight>
void multiply(const Tensor& x, const Tensor& offsets, const Tensor& out, const Weight& w) {
  const Matrix rows(x);
  for (int64_t e = 0; e + 1 < offsets.dim(0); ++e) {
    const Matrix weight = w(e);
    for (int64_t r = index(offsets, e); r < index(offsets, e + 1); ++r) {
      std::vector<double> sums(static_cast<size_t>(weight.cols));
      add_products(sums, rows.at(place_of(x, offsets, e, r)), weight);
      for (int64_t j = 0; j < weight.cols; ++j) store(out, r, j, sums[j]);
    }
  }
}

void forward(Exec&, const GroupedLinearForward& a) {
  const int64_t m = a.out.dim(1);
  multiply(a.x, a.offsets, a.out, [&](int64_t e) { return Matrix(a.weight, e * m, m).transposed(); });
}

void backward_data(Exec&, const GroupedLinearBackwardData& a) {
  const int64_t m = a.dout.dim(1), k = a.dx.dim(1);
  multiply(a.dout, a.offsets, a.dx, [&](int64_t e) {
    return is_fp8(a.dout) ? Matrix(a.weight, e * k, k).transposed() : Matrix(a.weight, e * m, m);
  });
}

void backward_weight(Exec&, const GroupedLinearBackwardWeight& a) {
  const int64_t m = a.dweight.dim(0) / (a.offsets.dim(0) - 1), k = a.dweight.dim(1);
  // FP8 operands are stored with the rows last.
  const Matrix dout = is_fp8(a.x) ? Matrix(a.dout).transposed() : Matrix(a.dout),
               x = is_fp8(a.x) ? Matrix(a.x).transposed() : Matrix(a.x);
  for (int64_t e = 0; e + 1 < a.offsets.dim(0); ++e) {
    Matrix sums(m, k);
    for (int64_t j = 0; a.accumulate && j < m; ++j)
      for (int64_t p = 0; p < k; ++p) sums.at(j)[p] = load(a.dweight, e * m + j, p);
    for (int64_t r = index(a.offsets, e); r < index(a.offsets, e + 1); ++r) {
      const int64_t at = place_of(a.x, a.offsets, e, r);
      for (int64_t j = 0; j < m; ++j)
        for (int64_t p = 0; p < k; ++p) sums.at(j)[p] += dout.at(at)[j] * x.at(at)[p];
    }
    for (int64_t j = 0; j < m; ++j)
      for (int64_t p = 0; p < k; ++p) store(a.dweight, e * m + j, p, sums.at(j)[p]);
  }
}

}  // namespace

void fill_grouped_linear(KernelTable& table) {
  table.grouped_linear_forward = forward;
  table.grouped_linear_backward_data = backward_data;
  table.grouped_linear_backward_weight = backward_weight;
}

}  // namespace nrl::ops::reference
