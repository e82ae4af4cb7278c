#pragma once
// QK-norm and RoPE by the kernels of their own families: what the CPU and the reference do.

#include "core/ops/kernel_table.h"

namespace nrl::ops::qk {

/// Heads [first, first + count) of (N, all heads, D).
inline Tensor heads_of(const Tensor& t, int64_t first, int64_t count) {
  Tensor part = t;
  part.data = static_cast<char*>(t.data) + first * t.stride[1] * size_of(t.dtype);
  part.shape[1] = count;
  return part;
}
/// The q (or k) part of rstd.
inline Tensor stats_of(const Tensor& rstd, int64_t begin, int64_t count) {
  return rstd.rows(begin, count);
}

inline void forward(Exec& e, const QkNormRopeForward& a) {
  const int64_t n = a.x.dim(0), q = a.heads, k = a.x.dim(1) - a.heads;
  if (a.q_weight) {
    auto norm = [&](int64_t first, int64_t heads, const Tensor& weight) {
      NormForward f;
      f.eps = a.eps;
      f.x = heads_of(a.x, first, heads);
      f.weight = weight;
      f.out = heads_of(a.out, first, heads);
      f.rstd = stats_of(a.rstd, n * first, n * heads);
      e.kernels->norm_forward(e, f);
    };
    norm(0, q, a.q_weight);
    norm(q, k, a.k_weight);
  }
  if (a.table) e.kernels->rope(e, {a.out, a.table, a.positions, false});
}

inline void backward(Exec& e, const QkNormRopeBackward& a) {
  const int64_t n = a.dx.dim(0), q = a.heads, k = a.dx.dim(1) - a.heads;
  if (a.table) e.kernels->rope(e, {a.dx, a.table, a.positions, true});
  if (!a.q_weight) return;
  auto norm = [&](int64_t first, int64_t heads, const Tensor& weight, const Tensor& dweight) {
    NormBackward b;
    b.dout = b.dx = heads_of(a.dx, first, heads);
    b.x = heads_of(a.x, first, heads);
    b.weight = weight;
    b.rstd = stats_of(a.rstd, n * first, n * heads);
    b.dweight = dweight;
    e.kernels->norm_backward(e, b);
  };
  norm(q, k, a.k_weight, a.dk_weight);
  norm(0, q, a.q_weight, a.dq_weight);
}

}  // namespace nrl::ops::qk
