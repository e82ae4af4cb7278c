#include "core/ops/shared/reference.h"

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

/// Calls body(e, row) for each row of each expert.
template <class Body>
void for_rows(const Tensor& offsets, const Body& body) {
  for (int64_t e = 0; e + 1 < offsets.dim(0); ++e)
    for (int64_t r = index(offsets, e); r < index(offsets, e + 1); ++r) body(e, r);
}

void forward(Exec&, const GroupedLinearForward& a) {
  const int64_t m = a.out.dim(1);
  for_rows(a.offsets, [&](int64_t e, int64_t r) {
    for (int64_t j = 0; j < m; ++j) {
      double sum = 0;
      for (int64_t p = 0; p < a.x.dim(1); ++p)
        sum += load(a.x, place_of(a.x, a.offsets, e, r), p) * load(a.weight, e * m + j, p);
      store(a.out, r, j, sum);
    }
  });
}

void backward_data(Exec&, const GroupedLinearBackwardData& a) {
  const int64_t m = a.dout.dim(1), k = a.dx.dim(1);
  for_rows(a.offsets, [&](int64_t e, int64_t r) {
    for (int64_t p = 0; p < a.dx.dim(1); ++p) {
      double sum = 0;
      for (int64_t j = 0; j < m; ++j)
        sum += load(a.dout, place_of(a.dout, a.offsets, e, r), j) *
               (is_fp8(a.dout) ? load(a.weight, e * k + p, j) : load(a.weight, e * m + j, p));
      store(a.dx, r, p, sum);
    }
  });
}

void backward_weight(Exec&, const GroupedLinearBackwardWeight& a) {
  const int64_t m = a.dweight.dim(0) / (a.offsets.dim(0) - 1);
  for (int64_t e = 0; e + 1 < a.offsets.dim(0); ++e)
    for (int64_t j = 0; j < m; ++j)
      for (int64_t p = 0; p < a.dweight.dim(1); ++p) {
        double sum = a.accumulate ? load(a.dweight, e * m + j, p) : 0.0;
        for (int64_t r = index(a.offsets, e); r < index(a.offsets, e + 1); ++r)
          if (const int64_t at = place_of(a.x, a.offsets, e, r); is_fp8(a.x))
            sum += load(a.dout, j, at) * load(a.x, p, at);
          else
            sum += load(a.dout, r, j) * load(a.x, r, p);
        store(a.dweight, e * m + j, p, sum);
      }
}

}  // namespace

void fill_grouped_linear(KernelTable& table) {
  table.grouped_linear_forward = forward;
  table.grouped_linear_backward_data = backward_data;
  table.grouped_linear_backward_weight = backward_weight;
}

}  // namespace nrl::ops::reference
