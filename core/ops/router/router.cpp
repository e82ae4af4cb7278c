#include "core/ops/router.h"

#include <algorithm>

#include "core/ops/shared/check.h"
#include "core/ops/shared/scratch.h"
#include "core/ops/step.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

bool dense(const Tensor& t, int64_t rows, int64_t columns, DType dtype) {
  return (t.data || rows * columns == 0) && t.rank == 2 && t.dim(0) == rows && t.dim(1) == columns &&
         t.contiguous() && t.dtype == dtype;
}

void check_logits(const char* op, const RouterRule& rule, const Tensor& logits) {
  NRL_CHECK(logits.rank == 2 && dense(logits, logits.dim(0), logits.dim(1), DType::f32),
            "{}: logits are {}, wanted contiguous f32 (N, E)", op, describe(logits));
  const char* reason = unsupported(rule, logits.dim(1));
  NRL_CHECK(reason[0] == 0, "{}: {}", op, reason);
}

void check_matrix(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t columns,
                  DType dtype) {
  NRL_CHECK(dense(t, rows, columns, dtype), "{}: {} is {}, wanted contiguous {}[{}, {}]", op, name,
            describe(t), name_of(dtype), rows, columns);
}

/// Counts of segments of `segment` tokens, which tokens [first, first + n) are among.
void check_counts(const char* op, const Tensor& counts, int64_t segment, int64_t first, int64_t n,
                  int64_t experts) {
  NRL_CHECK(counts.rank == 2 && segment >= 0 && first >= 0 && first + n <= segment * counts.dim(0),
            "{}: counts are {} of segments of {} for tokens {} to {}", op, describe(counts), segment, first,
            first + n);
  check_matrix(op, "counts", counts, counts.dim(0), experts, DType::i32);
}

/// Fills in the defaults of `segment` and `total`: this rank has all tokens.
template <class Args>
Args with_tokens(const char* op, Args a) {
  const int64_t n = a.logits.dim(0);
  if (a.total == 0) a.total = n;
  if (a.segment > 0 || !a.counts) return a;
  NRL_CHECK(a.counts.rank == 2 && a.counts.dim(0) > 0 && n % a.counts.dim(0) == 0,
            "{}: counts are {} for {} tokens", op, describe(a.counts), n);
  a.segment = n / a.counts.dim(0);
  return a;
}

}  // namespace

const char* unsupported(const RouterRule& r, int64_t experts) {
  if (experts < 1 || experts > max_experts) return "the number of experts must be from 1 to 1024";
  if (r.top_k < 1 || r.top_k > experts || r.top_k > max_top_k)
    return "the experts per token must be from 1 to the number of experts, and at most 32";
  if (r.groups < 1 || experts % r.groups) return "the experts must divide into the groups";
  if (r.group_top_k < 1 || r.group_top_k > r.groups)
    return "the chosen groups must be from 1 to the number of groups";
  if (r.top_k > r.group_top_k * (experts / r.groups))
    return "the chosen groups have fewer experts than a token chooses";
  return "";
}

Cost cost(const Exec&, const RouterForward& a) {
  return {.read = bytes_of(a.logits, a.bias), .written = bytes_of(a.expert, a.prob)};
}

Cost cost(const Exec&, const RouterCounts& a) {
  return {.read = bytes_of(a.expert, a.sum), .written = bytes_of(a.counts, a.sum)};
}

Cost cost(const Exec& exec, const RouterBalance& a) {
  return {.read = bytes_of(a.logits, a.counts, a.metrics),
          .written = bytes_of(a.metrics),
          .scratch = 2.0 * static_cast<double>(router_workspace(exec.partials())),
          .launches = 2};
}

Cost cost(const Exec&, const RouterBackward& a) {
  return {.read = bytes_of(a.logits, a.expert, a.dprob, a.counts, a.loss_scale),
          .written = bytes_of(a.dlogits)};
}

Cost cost(const Exec&, const RouterBias& a) {
  return {.read = bytes_of(a.counts, a.bias), .written = bytes_of(a.bias)};
}

size_t workspace(const Exec& exec, const RouterBalance&) {
  return exec.on_gpu() ? router_workspace(exec.partials()) : 0;
}

size_t router_workspace(int partials) {
  return 2 * scratch_bytes(partials, sizeof(double)) + scratch_alignment;
}

void router_forward(Exec& exec, const RouterForward& a) {
  if (noted(exec, Kernel::router_forward, a)) return;
  constexpr const char* op = "router_forward";
  check_logits(op, a.rule, a.logits);
  const int64_t n = a.logits.dim(0);
  NRL_CHECK(!a.bias || is_vector(a.bias, a.logits.dim(1), DType::f32), "{}: bias is {}", op,
            describe(a.bias));
  check_matrix(op, "expert", a.expert, n, a.rule.top_k, DType::i32);
  check_matrix(op, "prob", a.prob, n, a.rule.top_k, DType::f32);
  const trace::Range range = traced(exec, Kernel::router_forward, a);
  if (n > 0) exec.kernels->router_forward(exec, a);
}

void router_counts(Exec& exec, const RouterCounts& a) {
  if (noted(exec, Kernel::router_counts, a)) return;
  constexpr const char* op = "router_counts";
  NRL_CHECK(a.expert.rank == 2 && a.counts.rank == 2, "{}: expert is {}, counts are {}", op,
            describe(a.expert), describe(a.counts));
  check_matrix(op, "expert", a.expert, a.expert.dim(0), a.expert.dim(1), DType::i32);
  check_counts(op, a.counts, a.segment, a.first, a.expert.dim(0), a.counts.dim(1));
  NRL_CHECK(a.counts.dim(1) <= max_experts, "{}: counts are {}", op, describe(a.counts));
  NRL_CHECK(!a.sum || is_vector(a.sum, a.counts.dim(1), DType::i32), "{}: sum is {}", op, describe(a.sum));
  const trace::Range range = traced(exec, Kernel::router_counts, a);
  exec.kernels->router_counts(exec, a);
}

void router_balance(Exec& exec, const RouterBalance& given) {
  if (noted(exec, Kernel::router_balance, given)) return;
  constexpr const char* op = "router_balance";
  check_logits(op, given.rule, given.logits);
  RouterBalance a = with_tokens(op, given);
  a.total = std::max<int64_t>(a.total, 1);
  if (a.counts) check_counts(op, a.counts, a.segment, a.first, a.logits.dim(0), a.logits.dim(1));
  NRL_CHECK(is_vector(a.metrics, 3, DType::f64), "{}: metrics are {}", op, describe(a.metrics));
  const trace::Range range = traced(exec, Kernel::router_balance, given);
  if (a.logits.dim(0) > 0 || a.counts) exec.kernels->router_balance(exec, a);
}

void router_backward(Exec& exec, const RouterBackward& given) {
  if (noted(exec, Kernel::router_backward, given)) return;
  constexpr const char* op = "router_backward";
  check_logits(op, given.rule, given.logits);
  const RouterBackward a = with_tokens(op, given);
  const int64_t n = a.logits.dim(0), experts = a.logits.dim(1);
  check_matrix(op, "expert", a.expert, n, a.rule.top_k, DType::i32);
  check_matrix(op, "dprob", a.dprob, n, a.rule.top_k, DType::f32);
  if (a.aux != 0) check_counts(op, a.counts, a.segment, a.first, n, experts);
  NRL_CHECK(!a.loss_scale || is_vector(a.loss_scale, 1, DType::f64), "{}: loss_scale is {}", op,
            describe(a.loss_scale));
  NRL_CHECK(is_float(a.dlogits), "{}: dlogits is {}", op, describe(a.dlogits));
  check_matrix(op, "dlogits", a.dlogits, n, experts, a.dlogits.dtype);
  const trace::Range range = traced(exec, Kernel::router_backward, given);
  if (n > 0) exec.kernels->router_backward(exec, a);
}

void router_bias(Exec& exec, const RouterBias& a) {
  if (noted(exec, Kernel::router_bias, a)) return;
  constexpr const char* op = "router_bias";
  NRL_CHECK(a.bias.rank == 1 && is_vector(a.bias, a.bias.dim(0), DType::f32), "{}: bias is {}", op,
            describe(a.bias));
  NRL_CHECK(is_vector(a.counts, a.bias.dim(0), DType::i32), "{}: counts are {}", op, describe(a.counts));
  NRL_CHECK(is_vector(a.scalars, StepScalar::count, DType::f64), "{}: scalars are {}", op,
            describe(a.scalars));
  const trace::Range range = traced(exec, Kernel::router_bias, a);
  exec.kernels->router_bias(exec, a);
}

}  // namespace nrl::ops
