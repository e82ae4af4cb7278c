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
    clipped,         ///< rows whose gradient the clipping removes; cispo: whose ratio it changes
    entropy,         ///< sum of the entropies
    approx_entropy,  ///< sum of -(ratio of the token) log_prob, as NeMo RL estimates the entropy
    count
  };
};

/// The loss of each row n with a target, L = sum of c f, and w = dL/dlog_prob, with A the advantage, o the
/// importance weight (1 if absent), and rho = exp(clamp(log_prob - old, -20, 20)) (1 with gradient log_prob
/// if `old` is absent):
///   clip       o max(-A rho, -A clip(rho, 1 - lower, 1 + upper)); if A < 0 at most -A dual_clip o
///   cispo      -o A stop_gradient(clip(rho, 1 - lower, 1 + upper)) log_prob
///   reinforce  -o A log_prob
///   gspo       the clip of a whole sequence of n tokens, with rho = exp(min(D / n, 10)) and D the sum of
///              log_prob - old over its tokens; every row has a part of 1/n of the sequence's loss
///   rloo       the same with rho = exp(clamp(D, -20, 20)): the REINFORCE loss of a sequence
/// Where an argument of exp is clamped, or where clip or dual_clip decides the loss, the gradient is 0; on
/// their bounds it is not.
/// c, A and o of gspo and rloo must be the sequence's, the same in all of its rows; c / n takes the place of
/// c, also in the terms below.
///
/// Plus kl_penalty * c * k(reference - log_prob), k(x) with kappa = clamp(x, -20, 20):
///   k1 -kappa   k2 kappa^2 / 2   k3 exp(kappa) - kappa - 1
/// with values clamped to [-10, 10], as in NeMo RL; the gradient is 0 where either clamp acts. k1 as a loss
/// has the expected gradient 0. Minus entropy_coef * c * entropy, whose derivative goes to entropy_weight.
///
/// Rows without a target, with c = 0 or (gspo, rloo) without a segment have the weight 0 and contribute
/// nothing, even if other inputs are NaN there; a NaN of another row reaches the loss. Arithmetic is in f64,
/// weights are rounded once. Sums do not depend on the number of threads.
///
/// Sources: Schulman et al. 2017 (PPO), Ye et al. 2020 (dual clip), MiniMax-M1 2025 (CISPO), Zheng et al.
/// 2025 (GSPO), Ahmadian et al. 2024 (RLOO), Schulman 2020 (Approximating KL Divergence). TRL has the same
/// clip, gspo and rloo without the clamps at 20 and 10; its cispo bounds rho from above only, by
/// `epsilon_high` itself: lower = 1, upper = epsilon_high - 1.
struct PolicyLoss {
  struct Options {
    PolicyObjective type = PolicyObjective::clip;
    double lower = 0.2, upper = 0.2;  ///< >= 0
    double dual_clip = 0;             ///< 0: none, else > 1; clip, gspo and rloo only
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
  /// gspo and rloo only: (N) i32; optional (S) f64, D of all ranks (segment_sum), 0 if absent: the policy is
  /// the old one; (S) f64, n of all ranks, at least 1.
  Tensor segment = {}, log_ratios = {}, tokens = {};
  Options options;
  Tensor weight = {};          ///< optional (N) f32: dLoss/dlog_prob, overwritten
  Tensor entropy_weight = {};  ///< (N) f32 dLoss/dentropy, overwritten; with `weight` and an entropy_coef
  Tensor metrics = {};         ///< optional (PolicyMetric::count) f64, added to
};
void policy_loss(Exec& exec, const PolicyLoss& a);
Cost cost(const Exec& exec, const PolicyLoss& a);
size_t workspace(const Exec& exec, const PolicyLoss& a);

/// True for the types whose ratio is a sequence's.
constexpr bool is_of_sequences(PolicyObjective type) {
  return type == PolicyObjective::gspo || type == PolicyObjective::rloo;
}

/// Scratch bytes of policy_loss on a GPU.
size_t policy_loss_workspace(int partials);

}  // namespace nrl::ops
