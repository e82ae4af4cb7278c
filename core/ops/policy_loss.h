#pragma once
// Losses of policy gradients on the tokens of sampled sequences.

#include "core/config/objective_enums.h"
#include "core/ops/exec.h"

namespace nrl::ops {

/// Elements of PolicyLoss::metrics: sums over rows that have a target and a normalizer > 0.
struct PolicyMetric {
  enum Index : int {
    loss,            ///< of the policy, the divergence and the entropy, with the normalizers
    kl,              ///< with the normalizers: the estimate of the divergence from the reference
    ratio,           ///< sum of the ratios to the old policy
    ratio_clamped,   ///< the same after clipping
    clipped,         ///< rows whose gradient the clipping removes
    entropy,         ///< sum of the entropies
    approx_entropy,  ///< sum of -log_prob, as NeMo RL reports it
    count
  };
};

/// The loss of each row n with a target, L = sum of c f, and w = dL/dlog_prob, with A the advantage, o the
/// importance weight (1 if absent), and rho = exp(clamp(log_prob - old, -20, 20)) (1 with gradient log_prob
/// if `old` is absent):
///   clip       o max(-A rho, -A clip(rho, 1 - lower, 1 + upper)); if A < 0 at most -A dual_clip o
///   cispo      -o A stop_gradient(clip(rho, 1 - lower, 1 + upper)) log_prob
///   reinforce  -o A log_prob
///   gspo       the clip of a whole sequence with rho = exp(min(mean of log_prob - old over its tokens, 10));
///              every row has a part of 1/n of the sequence's loss
///   rloo       the same with rho = exp(clamp(sum of log_prob - old, -20, 20)): the REINFORCE loss of a
///   sequence
/// The normalizer c of gspo and rloo is the sequence's, in every row; each row then contributes c f / n.
/// Plus kl_penalty * c * k(reference - log_prob), k = clamp(kappa, -20, 20) with a zero gradient outside,
///   k1 -kappa   k2 kappa^2 / 2   k3 exp(kappa) - kappa - 1     (values clamped to [-10, 10] as in NeMo RL)
/// minus entropy_coef * c * entropy, whose derivative goes to entropy_weight. Sources: Schulman et al. 2017
/// (PPO), Ye et al. 2020 (dual clip), MiniMax-M1 2025 (CISPO), Zheng et al. 2025 (GSPO), Ahmadian et al. 2024
/// (RLOO).
struct PolicyLoss {
  struct Options {
    PolicyObjective type = PolicyObjective::clip;
    double lower = 0.2, upper = 0.2;
    double dual_clip = 0;  ///< 0: none, else > 1
    double kl_penalty = 0;
    KlEstimator kl_type = KlEstimator::k3;
    double entropy_coef = 0;
  };
  Tensor log_prob;         ///< (N) f32
  Tensor target;           ///< (N) i32; < 0: no target, weight 0
  Tensor normalizer;       ///< (N) f32: c >= 0
  Tensor advantage;        ///< (N) f32
  Tensor old = {};         ///< optional (N) f32: log-probabilities of the old policy
  Tensor reference = {};   ///< (N) f32; needed with a kl_penalty
  Tensor importance = {};  ///< optional (N) f32
  Tensor entropy = {};     ///< (N) f32; needed with an entropy_coef
  /// gspo and rloo: (N) i32, (S) f64 sums of log_prob - old of all ranks (segment_sum), (S) f64 tokens.
  Tensor segment = {}, log_ratios = {}, tokens = {};
  Options options;
  Tensor weight = {};          ///< optional (N) f32: dLoss/dlog_prob, overwritten
  Tensor entropy_weight = {};  ///< (N) f32 dLoss/dentropy, overwritten; with `weight` and an entropy_coef
  Tensor metrics = {};         ///< optional (PolicyMetric::count) f64, added to
};
void policy_loss(Exec& exec, const PolicyLoss& a);
Cost cost(const Exec& exec, const PolicyLoss& a);

}  // namespace nrl::ops
