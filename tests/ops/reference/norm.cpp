#include "core/base/philox.h"
#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

void forward(Exec&, const NormForward& a) {
  const int64_t d = a.x.dim(-1);
  const FusedDropout& drop = a.dropout;
  const PhiloxStream random(drop.seed,
                            dropout_stream(drop.stream, static_cast<const int64_t*>(drop.step.data)));
  Amax largest;
  for (int64_t r = 0; r < row_count(a.x); ++r) {
    const Tensor& in = a.residual ? a.sum : a.x;
    const int64_t row = drop.first_row + (drop.rows ? index(drop.rows, r) : r);
    for (int64_t i = 0; a.residual && i < d; ++i) {
      const bool keep = random.uniform(static_cast<uint64_t>(row * d + i)) >= drop.p;
      const double x = keep ? load(a.x, r, i) / (1.0 - static_cast<double>(drop.p)) : 0.0;
      store(a.sum, r, i, x + load(a.residual, r, i));
    }
    double mean = 0, variance = 0;
    for (int64_t i = 0; a.kind == NormKind::layer && i < d; ++i)
      mean += load(in, r, i) / static_cast<double>(d);
    for (int64_t i = 0; i < d; ++i) variance += std::pow(load(in, r, i) - mean, 2) / static_cast<double>(d);
    const double rstd = 1.0 / std::sqrt(variance + static_cast<double>(a.eps));
    for (int64_t i = 0; i < d; ++i) {
      const double out =
          rounded(in.dtype, (load(in, r, i) - mean) * rstd * (load(a.weight, i) + a.weight_offset) +
                                (a.bias ? load(a.bias, i) : 0.0));
      if (a.out) store(a.out, r, i, out);
      largest.add(out);
    }
    if (a.mean) store(a.mean, r, mean);
    if (a.rstd) store(a.rstd, r, rstd);
  }
  largest.raise(a.amax);
}

void backward(Exec&, const NormBackward& a) {
  const int64_t d = a.x.dim(-1);
  const bool layer = a.kind == NormKind::layer;
  std::vector<double> dweight(static_cast<size_t>(d)), dbias(static_cast<size_t>(d));
  Amax largest;
  for (int64_t r = 0; r < row_count(a.x); ++r) {
    const double mean = layer ? load(a.mean, r) : 0.0, rstd = load(a.rstd, r);
    double mean_dy = 0, mean_dy_xhat = 0;
    for (int64_t i = 0; i < d; ++i) {
      const double dout = load(a.dout, r, i), dy = dout * (load(a.weight, i) + a.weight_offset),
                   xhat = (load(a.x, r, i) - mean) * rstd;
      if (layer) mean_dy += dy / static_cast<double>(d);
      mean_dy_xhat += dy * xhat / static_cast<double>(d);
      dweight[i] += dout * xhat;
      dbias[i] += dout;
    }
    for (int64_t i = 0; i < d; ++i) {
      const double dy = load(a.dout, r, i) * (load(a.weight, i) + a.weight_offset),
                   xhat = (load(a.x, r, i) - mean) * rstd;
      const double residual = a.dresidual ? load(a.dresidual, r, i) : 0.0;
      const double dx = rounded(a.dx.dtype, rstd * (dy - mean_dy - xhat * mean_dy_xhat) + residual);
      store(a.dx, r, i, dx);
      largest.add(dx);
    }
  }
  largest.raise(a.amax);
  for (int64_t i = 0; i < d; ++i) {
    if (a.dweight) store(a.dweight, i, load(a.dweight, i) + dweight[i]);
    if (a.dbias) store(a.dbias, i, load(a.dbias, i) + dbias[i]);
  }
}

}  // namespace

void fill_norm(KernelTable& table) {
  table.norm_forward = forward;
  table.norm_backward = backward;
}

}  // namespace nrl::ops::reference
