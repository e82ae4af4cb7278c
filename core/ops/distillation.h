#pragma once
// Distillation from a teacher's k largest logits or log-probabilities per row. The ops work on slices of the
// vocabulary. Of a teacher's logits each rank finds the largest k that it has, and then the ranks together
// the largest k of all. Of a student's each rank gathers the ones that it has, the ranks' results are summed,
// every rank computes the divergence of all k logits and scatters the gradient into its own slice.

#include "core/config/objective_enums.h"
#include "core/ops/exec.h"

namespace nrl::ops {

/// The k largest numbers of each row and their ids, in the order of the ids, so that sums over them depend
/// neither on their sizes nor on how the vocabulary is divided. Of equal numbers the first is taken; NaN
/// counts as larger than all others. A row with fewer than k numbers ends in ids of -1 with -infinity.
struct TopColumns {
  /// (N, V) f32 or bf16, rows may be strided: the logits of tokens first_column, first_column + 1, ...
  Tensor logits = {};
  /// In place of `logits` what other calls wrote, contiguous: (R, N, M) i32 and f32, whose ids ascend from
  /// part to part.
  Tensor part_ids = {}, part_values = {};
  Tensor ids;                ///< (N, k) i32, contiguous, overwritten
  Tensor values;             ///< (N, k) f32, contiguous, overwritten
  int64_t first_column = 0;  ///< the token of column 0 of `logits`
};
void top_columns(Exec& exec, const TopColumns& a);
Cost cost(const Exec& exec, const TopColumns& a);

/// out[n, j] = logits[n, ids[n, j] - first_column], 0 where the slice does not have the id.
struct GatherColumns {
  Tensor logits;             ///< (N, V) f32 or bf16, rows may be strided
  Tensor ids;                ///< (N, k) i32, contiguous
  Tensor out;                ///< (N, k) f32, contiguous, overwritten
  int64_t first_column = 0;  ///< the token of column 0
};
void gather_columns(Exec& exec, const GatherColumns& a);
Cost cost(const Exec& exec, const GatherColumns& a);

/// The log-probability that the teacher has outside its k ids, in a reverse divergence with zero_outside.
inline constexpr float log_prob_outside = -100.0f;

/// score[n] = -T^2 D(q, p) with the divergence D of student p from teacher q at temperature T (Hinton et al.
/// 2015, section 2), which takes the place of a row's log-probability in the loss:
///   forward  KL(q || p) = sum of q_v (log q_v - log p_v)
///   reverse  KL(p || q) = sum of p_v (log p_v - log q_v)
///   mixed    mixed_weight * forward + (1 - mixed_weight) * reverse
/// q is the softmax of the teacher's k numbers over T, so that these may be logits or log-probabilities.
/// Without `zero_outside` p is the softmax of the student's k logits over T. With it p is the softmax of all
/// of the student's logits over T, and q_v = 0 outside the k ids, where log q_v counts as log_prob_outside.
/// NeMo RL has the same formulas with T = 1. Rows without a target have score 0 and gradient 0.
///
/// dLoss/dlogit is gradient[n, j] at the k ids, elsewhere p_v (rest[n, 0] + rest[n, 1] log p_v) with
/// zero_outside and 0 without it (scatter_columns()).
struct TopkKl {
  struct Options {
    KlDirection type = KlDirection::forward;
    double mixed_weight = 0.5;  ///< of the forward divergence, 0 to 1
    double temperature = 1;     ///< T > 0
    bool zero_outside = false;
  };
  Tensor student;          ///< (N, k) f32, contiguous: logits of the distinct ids of a row
  Tensor teacher;          ///< (N, k) f32, contiguous, finite
  Tensor target;           ///< (N) i32; < 0: no target
  Tensor lse = {};         ///< (N) f32, with zero_outside only: log-sum-exp of all logits of a row over T
  Tensor entropy = {};     ///< (N) f32, with zero_outside and a reverse part only: of the softmax over T
  Tensor weight = {};      ///< optional (N) f32: dLoss/dscore; with `gradient`
  Tensor loss_scale = {};  ///< optional (1) f64: multiplies the weights
  Tensor score;            ///< (N) f32, overwritten
  Tensor gradient = {};    ///< (N, k) f32, contiguous, overwritten; may be `student`. With `weight`
  Tensor rest = {};        ///< (N, 2) f32, contiguous, overwritten; with `weight` and zero_outside
  Options options = {};

  /// The part of the reverse divergence in D.
  double reverse() const {
    return options.type == KlDirection::forward   ? 0.0
           : options.type == KlDirection::reverse ? 1.0
                                                  : 1.0 - options.mixed_weight;
  }
};
void topk_kl(Exec& exec, const TopkKl& a);
Cost cost(const Exec& exec, const TopkKl& a);

/// The gradient of a slice of the logits z, from the gradient of k of them and the softmax p of the others:
///   dlogits[n, v] = gradient[n, j] where v + first_column = ids[n, j], the distinct ids of the row,
///   elsewhere p_v (rest[n, 0] + rest[n, 1] log p_v) with log p_v = z_v / T - lse[n]; 0 without `rest`
/// Rows whose `rest` is 0 do not depend on the logits.
struct ScatterColumns {
  Tensor logits;             ///< (N, V) f32 or bf16, overwritten by the gradient unless there are dlogits
  Tensor ids;                ///< (N, k) i32, contiguous
  Tensor gradient;           ///< (N, k) f32, contiguous
  Tensor rest = {};          ///< optional (N, 2) f32, contiguous
  Tensor lse = {};           ///< (N) f32, with `rest`
  Tensor dlogits = {};       ///< as for CrossEntropy: bf16 or f16 of f32 logits, apart or in their first half
  int64_t first_column = 0;  ///< the token of column 0
  float inverse_temperature = 1;
};
void scatter_columns(Exec& exec, const ScatterColumns& a);
Cost cost(const Exec& exec, const ScatterColumns& a);

}  // namespace nrl::ops
