#pragma once
// RMS norm of every head (Qwen3) and rotary embedding, in one pass over q and k between the fused QKV
// projection and attention.

#include "core/ops/exec.h"

namespace nrl::ops {

/// out = rope(norm(x)) for every head of q and k. Without q_weight and k_weight there is no norm, and out
/// must be x.
struct QkNormRopeForward {
  Tensor x;           ///< (N, heads + kv_heads, D) f32, bf16 or f16: q's heads, then k's; rows may be strided
  Tensor out;         ///< shape and dtype of x; must be disjoint from x with QK-norm, x itself without
  int64_t heads = 0;  ///< of q
  Tensor q_weight = {};     ///< (D), with QK-norm
  Tensor k_weight = {};     ///< (D), with QK-norm
  float weight_offset = 0;  ///< as in NormForward
  float eps = 1e-6f;
  Tensor rstd = {};       ///< (N * heads + N * kv_heads) f32, q's then k's; with QK-norm
  Tensor table = {};      ///< (positions, rotary_dim) f32, from rope_table; absent: no rotation
  Tensor positions = {};  ///< (N) i32
};

/// dx = the gradient at x, written over dout. With QK-norm dq_weight and dk_weight are accumulated (+=).
struct QkNormRopeBackward {
  Tensor dout;    ///< (N, heads + kv_heads, D), gradient at out
  Tensor x = {};  ///< as in the forward; read with QK-norm only
  Tensor dx;      ///< must be dout
  int64_t heads = 0;
  Tensor q_weight = {}, k_weight = {}, rstd = {}, table = {}, positions = {};
  float weight_offset = 0;
  Tensor dq_weight = {}, dk_weight = {};  ///< (D) f32, accumulated, with QK-norm
  Tensor amax = {};                       ///< as in Rope; without QK-norm
};

void qk_norm_rope_forward(Exec& exec, const QkNormRopeForward& a);
void qk_norm_rope_backward(Exec& exec, const QkNormRopeBackward& a);
/// With QK-norm; without, the op is rope.
Cost cost(const Exec& exec, const QkNormRopeForward& a);
Cost cost(const Exec& exec, const QkNormRopeBackward& a);
size_t workspace(const Exec& exec, const QkNormRopeBackward& a);

/// Workspace of the backward pass: `partials` (Exec::partials()) partial sums of the weights' gradients.
size_t qk_norm_rope_workspace(int64_t d, int partials);

}  // namespace nrl::ops
