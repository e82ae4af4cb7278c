#pragma once
// Sums of parts that were computed one after another: attention over disjoint sets of keys and its gradients
// (context parallelism).

#include "core/ops/exec.h"

namespace nrl::ops {

/// out = x, or out += x (accumulate), converted between f32, bf16 and f16; a sum is formed in f32 and rounded
/// once.
struct AddRows {
  Tensor x;    ///< (N, W) f32, bf16 or f16
  Tensor out;  ///< (N, W) f32, bf16 or f16; must not overlap x
  bool accumulate = false;
};
void add_rows(Exec& exec, const AddRows& a);
Cost cost(const Exec& exec, const AddRows& a);

/// Attention over two disjoint sets of keys from the results over each, in place:
///
///   lse' = log(exp(lse) + exp(part_lse))
///   out' = out exp(lse - lse') + part exp(part_lse - lse')
///
/// An lse of minus infinity means a query that saw no key of its set; `out` or `part` must be finite there.
struct MergeAttention {
  Tensor part;      ///< (N, heads, D) f32, bf16 or f16
  Tensor part_lse;  ///< (heads, N) f32, as attention_forward writes it
  Tensor out;       ///< (N, heads, D) f32
  Tensor lse;       ///< (heads, N) f32
};
void merge_attention(Exec& exec, const MergeAttention& a);
Cost cost(const Exec& exec, const MergeAttention& a);

}  // namespace nrl::ops
