#pragma once
// Token log-probabilities and their gradient on a chunk of logits. The LM head runs over chunks of tokens so
// that the logits of a whole batch never exist.

#include "core/ops/exec.h"

namespace nrl::ops {

/// log_prob[n] = logits[n, target[n]] - lse[n], lse = log-sum-exp over the row (f32, max subtracted).
/// With `weight` (w[n] = dLoss/dlog_prob[n]) the logits are overwritten by their gradient
/// w[n] * (onehot(target[n]) - softmax(logits[n])) in the same pass. target < 0 means "no target": log_prob
/// 0, gradient 0. Arithmetic is in f32; a bf16 gradient is rounded once. Rows are independent, so results do
/// not depend on the number of threads.
struct CrossEntropy {
  Tensor logits;       ///< (N, V) f32 or bf16; overwritten by the gradient if `weight` is given
  Tensor target;       ///< (N) i32
  Tensor weight = {};  ///< optional (N) f32: dLoss/dlog_prob
  Tensor log_prob;     ///< (N) f32
  Tensor lse = {};     ///< optional (N) f32
  /// Optional (N, V) bf16, requires `weight` and f32 logits: the gradient is written here, and the logits are
  /// overwritten with unspecified values. It may be the first half of each row of the logits' own memory
  /// (same address, row stride twice as many elements), which needs no second buffer.
  Tensor dlogits = {};
};
void cross_entropy(Exec& exec, const CrossEntropy& a);
Cost cost(const Exec& exec, const CrossEntropy& a);

}  // namespace nrl::ops
