// Composed of the reference norm and rotation, in double throughout.

#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

/// (N, heads, D) in double, filled from a tensor.
struct Exact {
  std::vector<double> data;
  Tensor tensor;

  explicit Exact(const Tensor& from) : data(static_cast<size_t>(from.numel())) {
    tensor = make_tensor(data.data(), DType::f64, {from.dim(0), from.dim(1), from.dim(2)});
    copy(from, tensor);
  }
  void round_to(const Tensor& to) const { copy(tensor, to); }
  static void copy(const Tensor& from, const Tensor& to) {
    for (int64_t r = 0; r < row_count(from); ++r)
      for (int64_t i = 0; i < from.dim(-1); ++i) store(to, r, i, load(from, r, i));
  }
};

/// Heads [first, first + count) of (N, all heads, D).
Tensor heads_of(const Tensor& t, int64_t first, int64_t count) {
  Tensor part = t;
  part.data = static_cast<char*>(t.data) + first * t.stride[1] * size_of(t.dtype);
  part.shape[1] = count;
  return part;
}

void forward(Exec& e, const QkNormRopeForward& a) {
  const int64_t n = a.x.dim(0), q = a.heads, k = a.x.dim(1) - a.heads;
  const Exact exact(a.x);
  auto norm = [&](int64_t first, int64_t heads, const Tensor& weight) {
    NormForward f;
    f.eps = a.eps;
    f.x = f.out = heads_of(exact.tensor, first, heads);
    f.weight = weight;
    f.weight_offset = a.weight_offset;
    f.rstd = a.rstd.rows(n * first, n * heads);
    e.kernels->norm_forward(e, f);
  };
  norm(0, q, a.q_weight);
  norm(q, k, a.k_weight);
  if (a.table) e.kernels->rope(e, {.x = exact.tensor, .table = a.table, .positions = a.positions});
  exact.round_to(a.out);
}

void backward(Exec& e, const QkNormRopeBackward& a) {
  const int64_t n = a.dx.dim(0), q = a.heads, k = a.dx.dim(1) - a.heads;
  const Exact exact(a.dout);
  if (a.table)
    e.kernels->rope(e, {.x = exact.tensor, .table = a.table, .positions = a.positions, .inverse = true});
  auto norm = [&](int64_t first, int64_t heads, const Tensor& weight, const Tensor& dweight) {
    NormBackward b;
    b.dout = b.dx = heads_of(exact.tensor, first, heads);
    b.x = heads_of(a.x, first, heads);
    b.weight = weight;
    b.weight_offset = a.weight_offset;
    b.rstd = a.rstd.rows(n * first, n * heads);
    b.dweight = dweight;
    e.kernels->norm_backward(e, b);
  };
  norm(0, q, a.q_weight, a.dq_weight);
  norm(q, k, a.k_weight, a.dk_weight);
  exact.round_to(a.dx);
}

}  // namespace

void fill_qk_norm_rope(KernelTable& table) {
  table.qk_norm_rope_forward = forward;
  table.qk_norm_rope_backward = backward;
}

}  // namespace nrl::ops::reference
