#include "core/ops/attention/attention.h"

#include "core/ops/attention/plan.h"
#include "core/ops/check.h"
#include "core/ops/kernel_table.h"
#include "core/trace/trace.h"

namespace nrl::ops {
namespace {

void check_heads(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  NRL_CHECK((t.data || t.numel() == 0) && same_shape(t, like) && t.dtype == like.dtype && dense_rows(t),
            "{}: {} is {}, wanted {} with contiguous heads", op, name, describe(t), describe(like));
}

/// What forward and backward have in common.
template <class Arguments>
void check(const char* op, const Arguments& a) {
  NRL_CHECK((a.q.data || a.q.numel() == 0) && a.q.rank == 3 && is_float(a.q) && dense_rows(a.q) &&
                a.q.dim(1) > 0 && a.q.dim(2) > 0,
            "{}: q is {}, wanted f32 or bf16 [tokens, heads, D]", op, describe(a.q));
  NRL_CHECK((a.k.data || a.k.numel() == 0) && a.k.rank == 3 && a.k.dtype == a.q.dtype && dense_rows(a.k) &&
                a.k.dim(2) == a.q.dim(2) && a.k.dim(1) > 0 && a.q.dim(1) % a.k.dim(1) == 0,
            "{}: k is {}, q is {}: D must agree and the heads divide", op, describe(a.k), describe(a.q));
  check_heads(op, "v", a.v, a.k);
  check_heads(op, "out", a.out, a.q);
  for (const Tensor* cu : {&a.cu_q, &a.cu_k})
    NRL_CHECK(cu->data && cu->rank == 1 && cu->dtype == DType::i32 && cu->contiguous() && cu->dim(0) >= 1 &&
                  cu->dim(0) == a.cu_q.dim(0),
              "{}: boundaries are {}, cu_q is {}", op, describe(*cu), describe(a.cu_q));
  NRL_CHECK(a.window >= 0 && (a.window == 0 || a.causal), "{}: a window of {} needs causal attention", op,
            a.window);
}

void check_lse(const char* op, const Tensor& lse, const Tensor& q) {
  NRL_CHECK((lse.data || lse.numel() == 0) && lse.rank == 2 && lse.dim(0) == q.dim(1) &&
                lse.dim(1) == q.dim(0) && lse.dtype == DType::f32 && dense_rows(lse),
            "{}: lse is {}, wanted f32[{}, {}]", op, describe(lse), q.dim(1), q.dim(0));
}

}  // namespace

void attention_forward(Exec& exec, const AttentionForward& a) {
  constexpr const char* op = "attention_forward";
  check(op, a);
  if (a.lse) check_lse(op, a.lse, a.q);
  const trace::Range range("attention_forward");
  if (a.q.numel() > 0) exec.kernels->attention_forward(exec, a);
}

void attention_backward(Exec& exec, const AttentionBackward& a) {
  constexpr const char* op = "attention_backward";
  check(op, a);
  check_heads(op, "dout", a.dout, a.q);
  check_lse(op, a.lse, a.q);
  check_heads(op, "dq", a.dq, a.q);
  check_heads(op, "dk", a.dk, a.k);
  check_heads(op, "dv", a.dv, a.v);
  const trace::Range range("attention_backward");
  if (a.q.numel() > 0 || a.k.numel() > 0) exec.kernels->attention_backward(exec, a);
}

size_t attention_workspace(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t d, int64_t max_sequence,
                           int threads) {
  return attention::workspace_bytes(tokens, heads, kv_heads, d, max_sequence, threads);
}

size_t attention_gpu_workspace(int64_t tokens, int64_t heads, int64_t d) {
  return static_cast<size_t>(tokens * heads * (d + 2)) * sizeof(float) + (size_t{1} << 20);
}

}  // namespace nrl::ops
