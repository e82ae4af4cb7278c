#pragma once
// Causal attention without the T x T matrix (Dao et al. 2022), grouped-query heads,
// variable-length sequences.
//
// Tokens of all sequences are concatenated: q (Nq, heads, D), k and v (Nk, kv_heads, D), rows may be
// strided views of one fused qkv buffer. Sequence s owns rows [cu[s], cu[s+1]). Query head h reads key head h
// / (heads / kv_heads). D is independent of the hidden size. When a sequence has more keys than queries
// (decoding), the queries are its last rows: query i of the sequence sees keys up to i + (keys - queries).

#include "core/base/host_device.h"
#include "core/ops/dropout.h"
#include "core/ops/exec.h"

namespace nrl::ops {

/// Blocks of rows at equal distances: block s has rows [first + s * step, first + s * step + rows).
struct RowBlocks {
  int64_t first = 0, rows = 0, step = 0;
  auto operator<=>(const RowBlocks&) const = default;
};

/// Sequence lengths, as far as the host knows them without reading cu_q and cu_k from device memory. The CPU
/// needs none of it; a GPU needs `longest` and is faster when all sequences have the same length.
struct SequenceLengths {
  int64_t longest = 0;  ///< no sequence has more queries or keys; 0: unknown
  bool equal = false;   ///< every sequence has exactly `longest` queries and keys
  /// > 0: this many sequences have both queries and keys, the blocks below. All others lack one of the two:
  /// their queries see nothing, their keys are not seen. Must not be set together with `equal`.
  int64_t blocks = 0;
  RowBlocks queries = {}, keys = {};
};

/// The heads that q has if it is a slice: [first, first + heads) of `all`. The dropout mask uses these
/// numbers, because it must not depend on how heads are divided over ranks.
struct HeadSlice {
  int64_t first = 0;
  int64_t all = 0;  ///< 0: q has all heads
};

/// FP8: q, k and v are e4m3 and dout is e5m2, each with a scale of the tensor; out and the gradients are f32
/// or bf16, and there is no dropout. Probabilities are rounded to e4m3 where they multiply v and dout, the
/// gradients of scores to e5m2, both with scales that need no pass over them. A probability is at most 1:
inline constexpr float probability_code_scale = 256;  ///< its code is this times as large

/// Returns the scale of the e5m2 score gradients scale * P (dP - delta), where dP = dout . v sums d products.
/// P (dP - delta) is at most half the largest dP: dP - delta is (1 - P) times a difference of two dP, and
/// P (1 - P) <= 1/4.
NRL_HOST_DEVICE inline float score_gradient_scale(float scale, int64_t d, float dout_scale, float v_scale) {
  constexpr float largest_v = 448, smallest = 0x1p-120f, largest = 0x1p+120f;
  // Score gradients have the format of dout, so that its largest number cancels.
  const float s = 0.5f * scale * static_cast<float>(d) * largest_v * (dout_scale * v_scale);
  return s < smallest ? smallest : s > largest ? largest : s;
}

/// out = drop(softmax(scale * q k^T, masked)) v; lse = log-sum-exp of the scaled, masked scores (natural
/// log). drop(P) is P / (1 - p) where the probability is kept and 0 elsewhere; the mask is a function of
/// (seed, stream, step, first_row + row of q, head, key within its sequence), with p rounded to a
/// multiple of 2^-16. `dropout.rows` and `key_places`, both or none, replace these rows and places: a
/// context-parallel rank has neither consecutive queries nor the first keys of its sequences.
struct AttentionForward {
  Tensor q;         ///< (Nq, heads, D) f32, bf16, f16 or FP8
  Tensor k;         ///< (Nk, kv_heads, D)
  Tensor v;         ///< (Nk, kv_heads, D)
  Tensor out;       ///< (Nq, heads, D)
  Tensor lse = {};  ///< (heads, Nq) f32, optional
  Tensor cu_q;      ///< (S + 1) i32, ascending from 0 to Nq
  Tensor cu_k;      ///< (S + 1) i32; the same tensor as cu_q in training
  float scale = 1.0f;
  bool causal = true;
  int64_t window = 0;  ///< > 0: a query sees itself and the window - 1 keys before it
  SequenceLengths lengths = {};
  FusedDropout dropout = {};  ///< of the probabilities; first_row belongs to row 0 of q
  HeadSlice slice = {};
  Tensor key_places = {};  ///< optional (Nk) i32
};

struct AttentionBackward {
  Tensor dout;               ///< (Nq, heads, D)
  Tensor q, k, v, out, lse;  ///< as in the forward pass
  Tensor cu_q, cu_k;         ///< as in the forward pass
  Tensor dq;                 ///< (Nq, heads, D), overwritten; must not alias q, k or v
  Tensor dk;                 ///< (Nk, kv_heads, D), overwritten
  Tensor dv;                 ///< (Nk, kv_heads, D), overwritten
  float scale = 1.0f;
  bool causal = true;
  int64_t window = 0;
  SequenceLengths lengths = {};
  FusedDropout dropout = {};  ///< as in the forward pass
  HeadSlice slice = {};
  Tensor key_places = {};  ///< as in the forward pass
};

void attention_forward(Exec& exec, const AttentionForward& a);
void attention_backward(Exec& exec, const AttentionBackward& a);
/// Sequences whose lengths the host does not know count as if all of them were the longest.
Cost cost(const Exec& exec, const AttentionForward& a);
Cost cost(const Exec& exec, const AttentionBackward& a);
size_t workspace(const Exec& exec, const AttentionForward& a);
size_t workspace(const Exec& exec, const AttentionBackward& a);

/// Scratch bytes of forward and backward; `max_sequence` is the longest sequence (of keys).
size_t attention_workspace(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t d, int64_t max_sequence,
                           int threads);

/// Scratch bytes of forward and backward on any GPU, for our own kernels and for cuDNN: training steps on
/// columns of a fused qkv buffer, without the deterministic option. `fp8`: also with operands in FP8.
size_t attention_gpu_workspace(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t d, bool fp8 = false);

/// (query, key) pairs that causal attention sees in one sequence of `keys` keys, of which the last `queries`
/// are queries as well, exact. `window` as in AttentionForward.
constexpr double attention_pairs(int64_t queries, int64_t keys, int64_t window) {
  const auto triangle = [](int64_t n) {
    return n <= 0 ? 0 : static_cast<double>(n) * static_cast<double>(n + 1) / 2;
  };
  const auto seen = [&](int64_t t) { return triangle(t) - (window > 0 ? triangle(t - window) : 0); };
  return seen(keys) - seen(keys - queries);
}
/// In a training sequence of length t.
constexpr double attention_pairs(int64_t t, int64_t window) {
  return attention_pairs(t, t, window);
}

/// Forward operations of causal attention over one sequence of length t, exact: 4 * heads * d for each pair.
constexpr double attention_flops(int64_t t, int64_t heads, int64_t d, int64_t window = 0) {
  return 4.0 * static_cast<double>(heads) * static_cast<double>(d) * attention_pairs(t, window);
}

}  // namespace nrl::ops
