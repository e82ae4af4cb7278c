#pragma once
// The losses of pairs of sequences of which one was chosen and one rejected: DPO and its relatives, and the
// loss of reward models.

#include "core/config/objective_enums.h"
#include "core/ops/exec.h"

namespace nrl::ops {

/// Columns of PairLoss::values, known before the step.
struct PairValue {
  enum Index : int {
    normalizer,  ///< c, of the chosen sequence: factor of the pair's losses, usually 1 / pairs of the step;
                 ///< 0: the pair does not count
    tokens,      ///< n: tokens with a loss
    reference,   ///< R: the sum of the reference's log-probabilities
    margin,      ///< m, of the chosen sequence: by which its score should exceed the other
    count
  };
};

/// Columns of PairLoss::metrics, sums over the pairs with c > 0 (and of the losses with the factor c).
struct PairMetric {
  enum Index : int {
    loss,             ///< preference_weight * preference_loss + sft_weight * sft_loss + the centering
    preference_loss,  ///< phi
    sft_loss,         ///< the negative log-likelihood of the chosen sequences
    accuracy,         ///< pairs in which the chosen one has the larger reward
    rewards_chosen,
    rewards_rejected,
    rewards_margin,    ///< rewards_chosen - rewards_rejected
    log_probs_chosen,  ///< of the policy, or scores: S
    log_probs_rejected,
    count
  };
};

/// The loss of segments 2p (chosen, +) and 2p + 1 (rejected, -) of each pair p, from a number S of each
/// segment: the sum of the log-probabilities of its tokens, or its score. With a = 1/max(n, 1) if averaged,
/// else 1, and u = a (S - R),
///   d = u+ - u-,   x = beta d - m,
///   loss = c * (preference_weight * phi + sft_weight * sft + center * (S+ + S-)^2),   sft = -a S+
/// and phi, with s the logistic function and e the label smoothing:
///   sigmoid   -(1 - e) log s(x) - e log s(-x)                    (DPO; e > 0: conservative DPO)
///   robust    (-(1 - e) log s(x) + e log s(-x)) / (1 - 2e)
///   hinge     max(0, 1 - x)                                      (SLiC)
///   ipo       (d - 1 / (2 beta))^2                               (averaged)
///   apo_zero  1 - s(beta u+) + s(beta u-)
///   apo_down  s(beta u+) + 1 - s(beta d)
///   simpo     sigmoid's with x = beta d - gamma - m              (averaged, R = 0)
///   orpo      -beta log s(g(u+) - g(u-)), g(u) = u - log(1 - exp(u))          (averaged, R = 0)
/// simpo and orpo do not read R. Margins are ignored by ipo, apo_zero, apo_down and orpo. orpo bounds u by
/// -1e-7, about the rounding of log-probabilities, and has the slope of g there: g is infinite at 0. The
/// reward of a sequence is beta u. All arithmetic is in f64, without overflow for any finite S.
///
/// A pair with c = 0 contributes nothing and has the gradient 0, also if its S is NaN. A NaN of another pair
/// reaches the loss. Sums do not depend on the number of threads.
///
/// Sources: Rafailov et al. 2023 (DPO), Mitchell 2023 (conservative DPO), Chowdhury et al. 2024 (robust),
/// Zhao et al. 2023 (SLiC), Azar et al. 2023 (IPO), D'Oosterlinck et al. 2024 (APO), Meng et al. 2024
/// (SimPO), Hong et al. 2024 (ORPO). The formulas are as in TRL 1.16 (which has label smoothing of sigmoid in
/// its CPOTrainer only) and NeMo RL.
struct PairLoss {
  struct Options {
    PreferenceLoss type = PreferenceLoss::sigmoid;
    double beta = 0.1, label_smoothing = 0, gamma = 0;  ///< beta > 0, smoothing in [0, 0.5)
    double preference_weight = 1, sft_weight = 0;
    bool average = false;      ///< must be set for ipo, simpo, orpo
    bool sft_average = false;  ///< a = 1/max(n+, 1) in sft
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
