#include "core/ops/attention.h"

#include <algorithm>

#include "core/ops/attention/cpu/plan.h"
#include "core/ops/attention_engine.h"
#include "core/ops/libraries.h"
#include "core/ops/shared/attention_dropout.h"
#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

void check_heads(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  NRL_CHECK((t.data || t.numel() == 0) && same_shape(t, like) && t.dtype == like.dtype && dense_rows(t),
            "{}: {} is {}, wanted {} with contiguous heads", op, name, describe(t), describe(like));
}

bool has_format(const Tensor& t, DType format) {
  return t.dtype == format && t.scales.kind == Scaling::tensor && t.scales.data;
}

/// As `like`, a result: f32 or bf16 where that is in FP8.
void check_result(const char* op, const char* name, const Tensor& t, Tensor like, DType out) {
  if (is_fp8(like)) like.dtype = out, like.scales = {};
  check_heads(op, name, t, like);
}

/// True when `count` blocks lie apart within `rows` rows.
bool fits(const RowBlocks& b, int64_t count, int64_t rows) {
  return b.first >= 0 && b.rows > 0 && (count == 1 || b.step >= b.rows) &&
         b.first + (count - 1) * b.step + b.rows <= rows;
}

/// Checks the arguments that forward and backward share.
template <class Arguments>
void check(const char* op, const Exec& exec, const Arguments& a) {
  const bool fp8 = is_fp8(a.q);
  NRL_CHECK((a.q.data || a.q.numel() == 0) && a.q.rank == 3 &&
                (fp8 ? has_format(a.q, DType::e4m3) : is_float(a.q)) && dense_rows(a.q) && a.q.dim(1) > 0 &&
                a.q.dim(2) > 0,
            "{}: q is {}, wanted f32, bf16, f16 or e4m3 with a scale [tokens, heads, D]", op, describe(a.q));
  NRL_CHECK((a.k.data || a.k.numel() == 0) && a.k.rank == 3 && a.k.dtype == a.q.dtype && dense_rows(a.k) &&
                a.k.dim(2) == a.q.dim(2) && a.k.dim(1) > 0 && a.q.dim(1) % a.k.dim(1) == 0,
            "{}: k is {}, q is {}: D must agree and the heads divide", op, describe(a.k), describe(a.q));
  check_heads(op, "v", a.v, a.k);
  check_result(op, "out", a.out, a.q, a.out.dtype);
  NRL_CHECK(!fp8 || (has_format(a.k, DType::e4m3) && has_format(a.v, DType::e4m3) && is_f32_or_bf16(a.out) &&
                     a.dropout.p == 0.0f),
            "{}: k is {}, v is {}, out is {}, dropout {}: FP8 wants scales of tensors, f32 or bf16 and no "
            "dropout",
            op, describe(a.k), describe(a.v), describe(a.out), a.dropout.p);
  for (const Tensor* cu : {&a.cu_q, &a.cu_k})
    NRL_CHECK(cu->data && cu->rank == 1 && cu->dtype == DType::i32 && cu->contiguous() && cu->dim(0) >= 1 &&
                  cu->dim(0) == a.cu_q.dim(0),
              "{}: boundaries are {}, cu_q is {}", op, describe(*cu), describe(a.cu_q));
  NRL_CHECK(a.window >= 0 && (a.window == 0 || a.causal), "{}: a window of {} needs causal attention", op,
            a.window);
  const SequenceLengths& known = a.lengths;
  const int64_t rows = (a.cu_q.dim(0) - 1) * known.longest;
  NRL_CHECK(!known.equal || (known.longest > 0 && a.q.dim(0) == rows && a.k.dim(0) == rows),
            "{}: {} sequences of equal length {} have not {} queries and {} keys", op, a.cu_q.dim(0) - 1,
            known.longest, a.q.dim(0), a.k.dim(0));
  NRL_CHECK(known.blocks == 0 || (!known.equal && fits(known.queries, known.blocks, a.q.dim(0)) &&
                                  fits(known.keys, known.blocks, a.k.dim(0)) &&
                                  std::max(known.queries.rows, known.keys.rows) <= known.longest),
            "{}: {} blocks of {} queries and {} keys in {} and {} rows, longest {}", op, known.blocks,
            known.queries.rows, known.keys.rows, a.q.dim(0), a.k.dim(0), known.longest);
  check_dropout(op, a.dropout, a.q.dim(0));
  NRL_CHECK((!a.dropout.rows && !a.key_places) ||
                (a.dropout.rows && is_vector(a.key_places, a.k.dim(0), DType::i32)),
            "{}: rows of dropout are {}, places of keys {}; k is {}", op, describe(a.dropout.rows),
            describe(a.key_places), describe(a.k));
  const int64_t heads = a.slice.all > 0 ? a.slice.all : a.q.dim(1);
  NRL_CHECK(a.slice.first >= 0 && a.slice.first + a.q.dim(1) <= heads, "{}: {} heads from head {} of {}", op,
            a.q.dim(1), a.slice.first, heads);
  NRL_CHECK(a.dropout.p == 0.0f ||
                ((a.dropout.first_row + a.q.dim(0)) * heads <= int64_t{1} << attention::row_head_bits &&
                 a.k.dim(0) < int64_t{attention::keys_per_block} << attention::key_block_bits),
            "{}: dropout of {} from row {}: too many rows for the random numbers", op, describe(a.q),
            a.dropout.first_row);
  if (exec.multiprocessors == 0) return;
  NRL_CHECK(known.longest > 0 || (a.q.dim(0) == 0 && a.k.dim(0) == 0),
            "{}: a GPU must be told the longest sequence", op);
  NRL_CHECK(a.q.dim(2) <= attention::largest_gpu_d, "{}: a head dimension of {}, a GPU takes {} at most", op,
            a.q.dim(2), attention::largest_gpu_d);
}

void check_lse(const char* op, const Tensor& lse, const Tensor& q) {
  NRL_CHECK((lse.data || lse.numel() == 0) && lse.rank == 2 && lse.dim(0) == q.dim(1) &&
                lse.dim(1) == q.dim(0) && lse.dtype == DType::f32 && dense_rows(lse),
            "{}: lse is {}, wanted f32[{}, {}]", op, describe(lse), q.dim(1), q.dim(0));
}

template <class Arguments>
Cost cost_of(const Exec& exec, const Arguments& a, double matmuls) {
  const SequenceLengths& known = a.lengths;
  int64_t queries = a.q.dim(0), keys = a.k.dim(0);
  const int64_t longest = std::max<int64_t>(known.longest, 1);
  int64_t sequences = std::max<int64_t>(std::max(queries, keys) / longest, 1);
  if (known.blocks > 0) {
    sequences = known.blocks;
    queries = sequences * known.queries.rows, keys = sequences * known.keys.rows;
  }
  const double pairs =
      static_cast<double>(sequences) *
      (a.causal ? attention_pairs(queries / sequences, keys / sequences, a.window)
                : static_cast<double>(queries / sequences) * static_cast<double>(keys / sequences));
  Cost c{.work = Work::attention};
  c.flops = 2 * matmuls * static_cast<double>(a.q.dim(1) * a.q.dim(2)) * pairs;
  c.operands = a.q.dtype;
  c.head_dim = a.q.dim(2);
  c.keys = pairs / static_cast<double>(std::max<int64_t>(queries, 1));
  c.library = exec.libraries &&
              attention::choose(*exec.libraries, attention::problem_of(a), exec.workspace.size).engine;
  return c;
}

}  // namespace

Cost cost(const Exec& exec, const AttentionForward& a) {
  Cost c = cost_of(exec, a, 2);
  c.read = bytes_of(a.q, a.k, a.v);
  c.written = bytes_of(a.out, a.lse);
  return c;
}

Cost cost(const Exec& exec, const AttentionBackward& a) {
  Cost c = cost_of(exec, a, 5);  // the scores are computed again
  c.backward = true;
  c.read = bytes_of(a.dout, a.q, a.k, a.v, a.out, a.lse);
  c.written = bytes_of(a.dq, a.dk, a.dv);
  c.launches = c.library ? 3 : 2;  // row sums of dout * out, the gradients; a library converts dq
  return c;
}

namespace {

template <class Arguments>
size_t workspace_of(const Exec& exec, const Arguments& a) {
  const int64_t queries = a.q.dim(0), keys = a.k.dim(0), heads = a.q.dim(1), kv_heads = a.k.dim(1),
                d = a.q.dim(2);
  if (exec.on_gpu()) return attention_gpu_workspace(std::max(queries, keys), heads, kv_heads, d, is_fp8(a.q));
  const int64_t longest = a.lengths.longest > 0 ? std::min(a.lengths.longest, keys) : keys;
  return attention_workspace(queries, heads, kv_heads, d, longest, exec.threads);
}

}  // namespace

size_t workspace(const Exec& exec, const AttentionForward& a) {
  return workspace_of(exec, a);
}

size_t workspace(const Exec& exec, const AttentionBackward& a) {
  return workspace_of(exec, a);
}

void attention_forward(Exec& exec, const AttentionForward& a) {
  if (noted(exec, Kernel::attention_forward, a)) return attention::foresee(exec, attention::problem_of(a));
  constexpr const char* op = "attention_forward";
  check(op, exec, a);
  if (a.lse) check_lse(op, a.lse, a.q);
  const trace::Range range = traced(exec, Kernel::attention_forward, a);
  if (a.q.numel() > 0) exec.kernels->attention_forward(exec, a);
}

void attention_backward(Exec& exec, const AttentionBackward& a) {
  if (noted(exec, Kernel::attention_backward, a)) return attention::foresee(exec, attention::problem_of(a));
  constexpr const char* op = "attention_backward";
  check(op, exec, a);
  const bool fp8 = is_fp8(a.q);
  Tensor dout = a.q;
  if (fp8) dout.dtype = DType::e5m2;
  check_heads(op, "dout", a.dout, dout);
  NRL_CHECK(!fp8 || has_format(a.dout, DType::e5m2), "{}: dout is {} without a scale", op, describe(a.dout));
  check_lse(op, a.lse, a.q);
  check_result(op, "dq", a.dq, a.q, a.out.dtype);
  check_result(op, "dk", a.dk, a.k, a.out.dtype);
  check_result(op, "dv", a.dv, a.v, a.out.dtype);
  const trace::Range range = traced(exec, Kernel::attention_backward, a);
  if (a.q.numel() > 0 || a.k.numel() > 0) exec.kernels->attention_backward(exec, a);
}

size_t attention_workspace(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t d, int64_t max_sequence,
                           int threads) {
  return attention::workspace_bytes(tokens, heads, kv_heads, d, max_sequence, threads);
}

size_t attention_gpu_workspace(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t d, bool fp8) {
  // Row sums, and statistics in another order; f32 gradients of q with the row steps of the fused buffer;
  // with grouped heads f32 gradients of k and v for each query head, and their sums before they are moved.
  const int64_t sums = 3 * heads, dq = (heads + 2 * kv_heads) * d,
                per_head = heads != kv_heads ? 2 * heads * d + kv_heads * d : 0;
  // In FP8 with grouped heads twice the gradients of k and v for each query head, and none of q.
  const int64_t in_fp8 = fp8 && heads != kv_heads ? 4 * heads * d : 0;
  constexpr size_t descriptions = size_t{1} << 20;
  return static_cast<size_t>(tokens * (sums + std::max(dq + per_head, in_fp8))) * sizeof(float) +
         descriptions;
}

}  // namespace nrl::ops
