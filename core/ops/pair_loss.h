#pragma once
// The losses of pairs of sequences of which one was chosen and one rejected: DPO and its relatives, and the
// loss of reward models.

#include "core/config/objective_enums.h"
#include "core/ops/exec.h"

namespace nrl::ops {

/// Columns of PairLoss::values, known before the step.
struct PairValue {
  enum Index : int {
    normalizer,  ///< c: factor of the pair's losses, usually 1 / pairs of the step; 0: the pair does not
                 ///< count
    tokens,      ///< n: tokens with a loss
    reference,   ///< R: the sum of the reference's log-probabilities
    margin,      ///< m, of the chosen sequence: by which its score should exceed the other
    count
  };
};

/// Columns of PairLoss::metrics, sums over the pairs with c > 0 (and of the losses with the factor c).
struct PairMetric {
  enum Index : int {
    loss,  ///< preference_weight * preference_loss + sft_weight * sft_loss
    preference_loss,
    sft_loss,  ///< -log-likelihood of the chosen sequences
    accuracy,  ///< pairs in which the chosen one has the larger reward
    rewards_chosen,
    rewards_rejected,
    log_probs_chosen,  ///< of the policy, or scores
    log_probs_rejected,
    count
  };
};

/// The loss of segments 2p (chosen, +) and 2p + 1 (rejected, -) of each pair p, from a number S of each
/// segment: the sum of the log-probabilities of its tokens, or its score. With a = 1/n if averaged, else 1,
///   d = a+ (S+ - R+) - a- (S- - R-),   x = beta d - m,   loss = c * phi
/// and phi, with s the logistic function and e the label smoothing:
///   sigmoid   -(1 - e) log s(x) - e log s(-x)                    (DPO; e > 0: conservative DPO)
///   robust    (-(1 - e) log s(x) + e log s(-x)) / (1 - 2e)
///   hinge     max(0, 1 - x)                                      (SLiC)
///   ipo       (d - 1 / (2 beta))^2                               (averaged)
///   apo_zero  1 - s(beta a+ (S+ - R+)) + s(beta a- (S- - R-))
///   apo_down  s(beta a+ (S+ - R+)) + 1 - s(beta (a+ (S+ - R+) - a- (S- - R-)))
///   simpo     -(1 - e) log s(x) - e log s(-x), x = beta (a+ S+ - a- S-) - gamma     (averaged, no reference)
///   orpo      -beta log s(g(a+ S+) - g(a- S-)), g(u) = u - log(1 - exp(u))          (averaged, no reference)
/// plus center * (S+ + S-)^2, plus sft_weight * sft, sft = -a S+. The reward of a sequence is
/// beta a (S - R), without a reference beta a S. Sources: Rafailov et al. 2023 (DPO), Azar et al. 2023
/// (IPO), D'Oosterlinck et al. 2024 (APO), Meng et al. 2024 (SimPO), Hong et al. 2024 (ORPO); the formulas
/// are those of TRL 1.16 and NeMo RL.
struct PairLoss {
  struct Options {
    PreferenceLoss type = PreferenceLoss::sigmoid;
    double beta = 0.1, label_smoothing = 0, gamma = 0;
    double preference_weight = 1, sft_weight = 0;
    bool average = false;      ///< must be set for ipo, simpo, orpo
    bool sft_average = false;  ///< a = 1/n+ in sft
    double center = 0;
  };
  Tensor sums;    ///< (S) f64, S even
  Tensor values;  ///< (S, PairValue::count) f64
  Options options;
  Tensor gradient = {};  ///< optional (S) f64: dLoss/dS, overwritten
  Tensor metrics = {};   ///< optional (PairMetric::count) f64, added to
};
void pair_loss(Exec& exec, const PairLoss& a);
Cost cost(const Exec& exec, const PairLoss& a);

}  // namespace nrl::ops
