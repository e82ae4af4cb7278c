#pragma once
// Token log-probabilities and their gradient on a chunk of logits. The LM head runs over chunks of tokens so
// that the logits of a whole batch never exist.

#include "core/ops/exec.h"

namespace nrl::ops {

/// log_prob[n] = z[n, target[n]] - lse[n], z = logits * inverse_temperature, lse = log-sum-exp of z over the
/// row (f32, max subtracted). With `weight` (w[n] = dLoss/dlog_prob[n]) the logits are overwritten by their
/// gradient w[n] * (onehot(target[n]) - softmax(logits[n])) in the same pass. target < 0 means "no target":
/// log_prob 0, gradient 0. Arithmetic is in f32; a bf16 or f16 gradient is rounded once. Rows are
/// independent, so results do not depend on the number of threads.
struct CrossEntropy {
  Tensor logits;           ///< (N, V) f32 or bf16; overwritten by the gradient if `weight` is given
  Tensor target;           ///< (N) i32
  Tensor weight = {};      ///< optional (N) f32: dLoss/dlog_prob
  Tensor loss_scale = {};  ///< optional (1) f64: multiplies the weights
  Tensor log_prob;         ///< (N) f32
  Tensor lse = {};         ///< optional (N) f32
  Tensor entropy = {};     ///< optional (N) f32, without `weight`: of softmax(z); 0 where there is no target
  float inverse_temperature = 1;  ///< > 0; must be 1 with `weight`
  /// Optional (N, V) bf16 or f16, requires `weight` and f32 logits: the gradient is written here, and the
  /// logits are overwritten with unspecified values. It may be the first half of each row of the logits' own
  /// memory (same address, row stride twice as many elements), which needs no second buffer.
  Tensor dlogits = {};
  /// The logits may be a slice of the columns, tokens [first_column, first_column + V). `statistics` of all
  /// slices, (slices, N, 3) f32 contiguous, or (slices, N, 4) with an entropy, then replace the maximum and
  /// the sums over a row.
  int64_t first_column = 0;
  Tensor statistics = {};
};
void cross_entropy(Exec& exec, const CrossEntropy& a);
Cost cost(const Exec& exec, const CrossEntropy& a);

/// Computes the contribution of a slice of the columns to the log-sum-exp and log-probability of each row:
///   out[n] = (m, sum of exp(z[n] - m), z[n, target[n] - first_column], sum of exp(z[n] - m) (z[n] - m))
/// with z as for CrossEntropy and the maximum m of the row, at least the lowest finite number; the third is 0
/// where the slice does not have the target, the fourth is computed if `out` has four columns. Every rank of
/// a vocabulary split computes its own, and cross_entropy() combines them.
struct CrossEntropyStatistics {
  Tensor logits;             ///< (N, V) f32 or bf16
  Tensor target;             ///< (N) i32; < 0: no target
  int64_t first_column = 0;  ///< the token of column 0
  Tensor out;                ///< (N, 3) f32, contiguous; (N, 4) for entropies
  float inverse_temperature = 1;
};
void cross_entropy_statistics(Exec& exec, const CrossEntropyStatistics& a);
Cost cost(const Exec& exec, const CrossEntropyStatistics& a);

/// Computes the gradient of the logits from the lse, and the entropy if wanted, of cross_entropy() without a
/// weight:
///   dlogits[n, v] = t (w (1[v = target] - p_v) - e p_v (log p_v + entropy)),   p = exp(z - lse)
/// with z = t logits, t the inverse temperature, w = weight[n] and e = entropy_weight[n], both times the loss
/// scale. 0 for rows without a target. With equal weights and t = 1 CrossEntropy computes the same gradients
/// to the rounding of one multiplication and of lse in f32: p is off by a relative 2^-24 |lse|.
struct CrossEntropyGradient {
  Tensor logits;               ///< (N, V) f32 or bf16, overwritten by the gradient unless there are dlogits
  Tensor target;               ///< (N) i32
  Tensor lse;                  ///< (N) f32
  Tensor weight;               ///< (N) f32: dLoss/dlog_prob
  Tensor entropy = {};         ///< (N) f32; with entropy_weight
  Tensor entropy_weight = {};  ///< optional (N) f32: dLoss/dentropy
  Tensor loss_scale = {};      ///< optional (1) f64
  Tensor dlogits = {};         ///< as for CrossEntropy
  int64_t first_column = 0;    ///< the token of column 0
  float inverse_temperature = 1;
};
void cross_entropy_gradient(Exec& exec, const CrossEntropyGradient& a);
Cost cost(const Exec& exec, const CrossEntropyGradient& a);

}  // namespace nrl::ops
