#include "core/ops/policy_loss.h"

#include "core/ops/kl_estimate.h"
#include "core/ops/policy_loss/terms.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/scratch.h"
#include "core/ops/traced.h"

namespace nrl::ops {

Cost cost(const Exec& exec, const PolicyLoss& a) {
  Cost out{.read = bytes_of(a.log_prob, a.target, a.normalizer, a.advantage, a.old, a.reference, a.importance,
                            a.entropy, a.segment, a.log_ratios, a.tokens, a.metrics),
           .written = bytes_of(a.weight, a.entropy_weight, a.metrics)};
  if (a.metrics) {
    out.scratch = 2.0 * static_cast<double>(policy_loss_workspace(exec.partials()));
    out.launches = 2;
  }
  return out;
}

size_t workspace(const Exec& exec, const PolicyLoss& a) {
  return exec.on_gpu() && a.metrics ? policy_loss_workspace(exec.partials()) : 0;
}

size_t policy_loss_workspace(int partials) {
  return scratch_bytes(int64_t{partials} * PolicyMetric::count, sizeof(double)) + scratch_alignment;
}

void policy_loss(Exec& exec, const PolicyLoss& a) {
  if (noted(exec, Kernel::policy_loss, a)) return;
  const int64_t n = a.log_prob.numel();
  const auto check = [](const char* name, const Tensor& t, int64_t count, DType dtype) {
    NRL_CHECK(count == 0 ? t.numel() == 0 && t.dtype == dtype : is_vector(t, count, dtype),
              "policy_loss: {} is {}, wanted {}[{}]", name, describe(t), name_of(dtype), count);
  };
  const auto optional = [&](const char* name, const Tensor& t, bool needed) {
    if (t || (needed && n > 0)) check(name, t, n, DType::f32);
  };
  const PolicyLoss::Options& o = a.options;
  NRL_CHECK(o.lower >= 0 && o.upper >= 0, "policy_loss: ratios are clipped {} below 1 and {} above", o.lower,
            o.upper);
  const bool clips = o.type == PolicyObjective::clip || is_of_sequences(o.type);
  NRL_CHECK(o.dual_clip == 0 || (o.dual_clip > 1 && clips), "policy_loss: {} with dual_clip {}",
            name_of(o.type), o.dual_clip);
  check("log_prob", a.log_prob, n, DType::f32);
  check("target", a.target, n, DType::i32);
  check("normalizer", a.normalizer, n, DType::f32);
  check("advantage", a.advantage, n, DType::f32);
  optional("old", a.old, false);
  optional("reference", a.reference, o.kl_penalty != 0);
  optional("importance", a.importance, false);
  optional("entropy", a.entropy, o.entropy_coef != 0);
  optional("weight", a.weight, false);
  optional("entropy_weight", a.entropy_weight, a.weight && o.entropy_coef != 0);
  if (is_of_sequences(o.type)) {
    check("segment", a.segment, n, DType::i32);
    check("tokens", a.tokens, a.tokens.numel(), DType::f64);
    if (a.log_ratios) check("log_ratios", a.log_ratios, a.tokens.numel(), DType::f64);
  } else {
    NRL_CHECK(!a.segment && !a.log_ratios && !a.tokens, "policy_loss: {} with segments", name_of(o.type));
  }
  NRL_CHECK(!a.metrics || is_vector(a.metrics, PolicyMetric::count, DType::f64),
            "policy_loss: metrics are {}", describe(a.metrics));
  const trace::Range range = traced(exec, Kernel::policy_loss, a);
  if (n > 0) exec.kernels->policy_loss(exec, a);
}

double kl_estimate(KlEstimator type, double difference) {
  return policy::divergence(type, difference).value;
}

}  // namespace nrl::ops
