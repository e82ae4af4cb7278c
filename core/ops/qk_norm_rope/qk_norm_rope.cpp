#include "core/ops/qk_norm_rope.h"

#include "core/ops/rope.h"
#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

template <class Arguments>
void check(const char* op, const Arguments& a, const Tensor& x, const Tensor& out) {
  NRL_CHECK(
      out.data && is_float(out) && out.rank == 3 && dense_rows(out) && a.heads > 0 && a.heads < out.dim(1),
      "{}: {} with {} query heads", op, describe(out), a.heads);
  const int64_t n = out.dim(0), d = out.dim(2);
  NRL_CHECK(static_cast<bool>(a.q_weight) == static_cast<bool>(a.k_weight), "{}: one of two norm weights",
            op);
  if (a.q_weight) {
    NRL_CHECK(x.data && same_shape(x, out) && x.dtype == out.dtype && dense_rows(x), "{}: x is {}, out is {}",
              op, describe(x), describe(out));
    for (const Tensor* w : {&a.q_weight, &a.k_weight})
      NRL_CHECK(are_float_pair(*w, out) && is_vector(*w, d, a.q_weight.dtype), "{}: weight is {}", op,
                describe(*w));
    NRL_CHECK(is_vector(a.rstd, n * out.dim(1), DType::f32), "{}: rstd is {}", op, describe(a.rstd));
  }
  if (a.table) {
    NRL_CHECK(a.table.rank == 2 && a.table.dtype == DType::f32 && a.table.contiguous() &&
                  a.table.dim(1) <= d && a.table.dim(1) % 2 == 0,
              "{}: table is {}", op, describe(a.table));
    NRL_CHECK(is_vector(a.positions, n, DType::i32), "{}: positions are {}", op, describe(a.positions));
  }
}

}  // namespace

Cost cost(const Exec&, const QkNormRopeForward& a) {
  return {.read = bytes_of(a.x, a.q_weight, a.k_weight, a.positions) + rope_table_bytes(a.table, a.positions),
          .written = bytes_of(a.out, a.rstd)};
}

Cost cost(const Exec& exec, const QkNormRopeBackward& a) {
  const double gradients = bytes_of(a.dq_weight, a.dk_weight);
  return {.read = bytes_of(a.dout, a.x, a.q_weight, a.k_weight, a.rstd, a.positions) +
                  rope_table_bytes(a.table, a.positions) + gradients,
          .written = bytes_of(a.dx) + gradients,
          .scratch = 2 * exec.partials() * gradients,  // partial sums
          .launches = gradients > 0 ? 2 : 1};
}

size_t workspace(const Exec& exec, const QkNormRopeBackward& a) {
  return qk_norm_rope_workspace(a.dx.dim(2), exec.partials());
}

void qk_norm_rope_forward(Exec& exec, const QkNormRopeForward& a) {
  constexpr const char* op = "qk_norm_rope_forward";
  if (a.q_weight && noted(exec, Kernel::qk_norm_rope_forward, a)) return;
  check(op, a, a.x, a.out);
  if (!a.q_weight) {
    NRL_CHECK(a.x.data == a.out.data, "{}: without a norm it works in place", op);
    if (a.table) rope(exec, {.x = a.out, .table = a.table, .positions = a.positions});
    return;
  }
  const trace::Range range = traced(exec, Kernel::qk_norm_rope_forward, a);
  if (a.out.numel() > 0) exec.kernels->qk_norm_rope_forward(exec, a);
}

void qk_norm_rope_backward(Exec& exec, const QkNormRopeBackward& a) {
  constexpr const char* op = "qk_norm_rope_backward";
  if (a.q_weight && noted(exec, Kernel::qk_norm_rope_backward, a)) return;
  check(op, a, a.x, a.dx);
  NRL_CHECK(a.dout.data == a.dx.data && same_shape(a.dout, a.dx) && a.dout.dtype == a.dx.dtype &&
                a.dout.stride == a.dx.stride,
            "{}: dx is not dout", op);
  if (!a.q_weight) {
    if (a.table)
      rope(exec, {.x = a.dx, .table = a.table, .positions = a.positions, .inverse = true, .amax = a.amax});
    return;
  }
  NRL_CHECK(!a.amax, "{}: amax with a norm", op);
  const int64_t d = a.dx.dim(2);
  for (const Tensor* w : {&a.dq_weight, &a.dk_weight})
    NRL_CHECK(!*w || is_vector(*w, d, DType::f32), "{}: the gradient of a weight is {}", op, describe(*w));
  const size_t needed = workspace(exec, a);
  NRL_CHECK(exec.workspace.size >= needed, "{}: workspace of {} bytes, needs {}", op, exec.workspace.size,
            needed);
  const trace::Range range = traced(exec, Kernel::qk_norm_rope_backward, a);
  if (a.dx.numel() > 0) exec.kernels->qk_norm_rope_backward(exec, a);
}

size_t qk_norm_rope_workspace(int64_t d, int partials) {
  // A partial sum of dq_weight and one of dk_weight, as dweight and dbias of a norm.
  return norm_backward_workspace(d, partials);
}

}  // namespace nrl::ops
