#pragma once
// The router of a mixture of experts: which experts a token is sent to, with which weights, and the losses
// that keep the experts equally busy. All in f32.
//
// N tokens, E experts, k experts per token, B segments of S consecutive tokens: the sequences of a
// microbatch, or one. Several ranks may have a part of the tokens each: this rank's are tokens `first` to
// first + N - 1 of B S, and losses are means over `total` tokens of all ranks, which share their counts (the
// sum of RouterCounts).
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

/// Why the rule cannot choose among so many experts; empty if it can.
const char* unsupported(const RouterRule& rule, int64_t experts);

/// Ties go to the expert (or group) with the lower index.
struct RouterForward {
  RouterRule rule;
  Tensor logits;     ///< (N, E) f32
  Tensor bias = {};  ///< optional (E) f32, added to s for the choice only
  Tensor expert;     ///< (N, k) i32, by descending s + bias
  Tensor prob;       ///< (N, k) f32
};

/// counts[b, e] = this rank's tokens of segment b that chose expert e.
struct RouterCounts {
  Tensor expert;      ///< (N, k) i32
  int64_t segment;    ///< S
  int64_t first = 0;  ///< first + N <= B S
  Tensor counts;      ///< (B, E) i32
  Tensor sum = {};    ///< optional (E) i32: += the tokens of all segments
};

/// metrics += share * {aux loss, z loss, load} with q = s / (sum of all s), b(t) the segment of token t:
///   aux loss = sum over t, e of q[t, e] E counts[b(t), e] / (sum over e' of counts[b(t), e']) / total
///   z loss = sum over t of logsumexp(logits[t])^2 / total;  load = max over e / mean over e of the tokens
/// If all tokens of a segment are counted, k S of them, the aux loss is the mean over segments of
/// E / (k S^2) * sum over e of counts[b, e] * (sum over t in b of q[t, e]). Without counts only the z loss is
/// added, with counts and no tokens (N = 0) only the load.
struct RouterBalance {
  RouterRule rule;
  Tensor logits;        ///< (N, E) f32
  Tensor counts;        ///< (B, E) i32 or empty
  int64_t first = 0;    ///< as in RouterCounts
  int64_t segment = 0;  ///< 0: N / B
  int64_t total = 0;    ///< 0: N
  float share = 1;
  bool load = true;  ///< false: the load is not added, as another rank does
  Tensor metrics;    ///< (3) f64
};

/// dlogits = gradient of dprob * prob + loss_scale * (aux * (aux loss) + z * (z loss)); the counts are
/// constants.
struct RouterBackward {
  RouterRule rule;
  Tensor logits;                              ///< (N, E) f32
  Tensor expert;                              ///< (N, k) i32
  Tensor dprob;                               ///< (N, k) f32
  Tensor counts = {};                         ///< (B, E) i32, if aux is not 0
  int64_t first = 0, segment = 0, total = 0;  ///< as in RouterBalance
  float aux = 0, z = 0;
  Tensor loss_scale = {};  ///< (1) f64; empty: 1
  Tensor dlogits;          ///< (N, E) f32, bf16 or f16
};

/// bias[e] += rate * sign(mean of the counts - counts[e]): experts with fewer tokens than the mean are chosen
/// more often. Nothing in a step that is skipped.
struct RouterBias {
  Tensor counts;   ///< (E) i32
  Tensor scalars;  ///< (StepScalar::count) f64
  float rate = 0;
  Tensor bias;  ///< (E) f32
};

void router_forward(Exec& exec, const RouterForward& a);
void router_counts(Exec& exec, const RouterCounts& a);
void router_balance(Exec& exec, const RouterBalance& a);
void router_backward(Exec& exec, const RouterBackward& a);
void router_bias(Exec& exec, const RouterBias& a);
Cost cost(const Exec& exec, const RouterForward& a);
Cost cost(const Exec& exec, const RouterCounts& a);
Cost cost(const Exec& exec, const RouterBalance& a);
size_t workspace(const Exec& exec, const RouterBalance& a);
Cost cost(const Exec& exec, const RouterBackward& a);
Cost cost(const Exec& exec, const RouterBias& a);

/// Scratch bytes of router_balance.
size_t router_workspace(int partials);

}  // namespace nrl::ops
