#pragma once
// Token log-probabilities and their gradient on a chunk of logits. The LM head runs over chunks of tokens so
// that the logits of a whole batch never exist.

#include "core/ops/exec.h"

namespace nrl::ops {

/// log_prob[n] = logits[n, target[n]] - lse[n], lse = log-sum-exp over the row (f32, max subtracted).
/// With `weight` (w[n] = dLoss/dlog_prob[n]) the logits are overwritten by their gradient
/// w[n] * (onehot(target[n]) - softmax(logits[n])) in the same pass. target < 0 means "no target": log_prob
/// 0, gradient 0. Arithmetic is in f32; a bf16 or f16 gradient is rounded once. Rows are independent, so
/// results do not depend on the number of threads.
struct CrossEntropy {
  Tensor logits;           ///< (N, V) f32 or bf16; overwritten by the gradient if `weight` is given
  Tensor target;           ///< (N) i32
  Tensor weight = {};      ///< optional (N) f32: dLoss/dlog_prob
  Tensor loss_scale = {};  ///< optional (1) f64: multiplies the weights
  Tensor log_prob;         ///< (N) f32
  Tensor lse = {};         ///< optional (N) f32
  /// Optional (N, V) bf16 or f16, requires `weight` and f32 logits: the gradient is written here, and the
  /// logits are overwritten with unspecified values. It may be the first half of each row of the logits' own
  /// memory (same address, row stride twice as many elements), which needs no second buffer.
  Tensor dlogits = {};
  /// The logits may be a slice of the columns, tokens [first_column, first_column + V). `statistics` of all
  /// slices, (slices, N, 3) f32 contiguous, then replace the maximum and the sum over a row.
  int64_t first_column = 0;
  Tensor statistics = {};
};
void cross_entropy(Exec& exec, const CrossEntropy& a);
Cost cost(const Exec& exec, const CrossEntropy& a);

/// Computes the contribution of a slice of the columns to the log-sum-exp and log-probability of each row:
///   out[n] = (m, sum of exp(logits[n] - m), logits[n, target[n] - first_column])
/// with the maximum m of the row, at least the lowest finite number; the third is 0 where the slice does not
/// have the target. Every rank of a vocabulary split computes its own, and cross_entropy() combines them.
struct CrossEntropyStatistics {
  Tensor logits;             ///< (N, V) f32 or bf16
  Tensor target;             ///< (N) i32; < 0: no target
  int64_t first_column = 0;  ///< the token of column 0
  Tensor out;                ///< (N, 3) f32, contiguous
};
void cross_entropy_statistics(Exec& exec, const CrossEntropyStatistics& a);
Cost cost(const Exec& exec, const CrossEntropyStatistics& a);

}  // namespace nrl::ops
