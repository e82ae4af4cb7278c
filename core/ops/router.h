#pragma once
// The router of a mixture of experts: which experts a token is sent to, with which weights, and the losses
// that keep the experts equally busy. All in f32.
//
// N tokens, E experts, k experts per token, segments of S consecutive tokens (B = N / S of them).
//
//   s = softmax(logits) or sigmoid(logits)
//   chosen = the k experts with the largest s + bias, within the chosen groups of experts
//   prob = scale * s, or scale * s / (sum of the chosen s), of the chosen experts

#include "core/ops/exec.h"

namespace nrl::ops {

inline constexpr int64_t max_experts = 1024, max_top_k = 32;

enum class RouterScore : uint8_t { softmax, sigmoid };

struct RouterRule {
  int64_t top_k = 1;
  RouterScore score = RouterScore::softmax;
  /// Divides by the sum of the chosen scores. With softmax that is the softmax over the chosen logits only.
  bool normalize = false;
  float scale = 1;
  /// Experts [g E / groups, (g + 1) E / groups) are group g. Its score is the sum of its top_k / group_top_k
  /// largest s + bias; only experts of the group_top_k best groups are chosen.
  int64_t groups = 1, group_top_k = 1;
};

/// Why there is no such choice among so many experts, in words; empty when there is.
const char* unsupported(const RouterRule& rule, int64_t experts);

/// Of equal scores the expert (or group) with the lower index wins.
struct RouterForward {
  RouterRule rule;
  Tensor logits;     ///< (N, E) f32
  Tensor bias = {};  ///< optional (E) f32, added to s for the choice only
  Tensor expert;     ///< (N, k) i32, by descending s + bias
  Tensor prob;       ///< (N, k) f32
};

/// counts[b, e] = tokens of segment b that chose expert e.
struct RouterCounts {
  Tensor expert;    ///< (N, k) i32
  int64_t segment;  ///< S, divides N
  Tensor counts;    ///< (B, E) i32
};

/// metrics += share * {aux loss, z loss, load} with q = s / (sum of all s):
///   aux loss = mean over b of E / (k S^2) * sum over e of counts[b, e] * (sum over t in b of q[t, e])
///   z loss   = mean over t of logsumexp(logits[t])^2
///   load     = max over e / mean over e of the tokens of an expert
struct RouterBalance {
  RouterRule rule;
  Tensor logits;  ///< (N, E) f32
  Tensor counts;  ///< (B, E) i32
  float share = 1;
  Tensor metrics;  ///< (3) f64
};

/// dlogits = gradient of dprob * prob + aux * (aux loss) + z * (z loss); the counts are constants.
struct RouterBackward {
  RouterRule rule;
  Tensor logits;       ///< (N, E) f32
  Tensor expert;       ///< (N, k) i32
  Tensor dprob;        ///< (N, k) f32
  Tensor counts = {};  ///< (B, E) i32, if aux is not 0
  float aux = 0, z = 0;
  Tensor dlogits;  ///< (N, E) f32 or bf16
};

void router_forward(Exec& exec, const RouterForward& a);
void router_counts(Exec& exec, const RouterCounts& a);
void router_balance(Exec& exec, const RouterBalance& a);
void router_backward(Exec& exec, const RouterBackward& a);
Cost cost(const Exec& exec, const RouterForward& a);
Cost cost(const Exec& exec, const RouterCounts& a);
Cost cost(const Exec& exec, const RouterBalance& a);
Cost cost(const Exec& exec, const RouterBackward& a);

/// Scratch bytes of router_balance.
size_t router_workspace(int partials);

}  // namespace nrl::ops
