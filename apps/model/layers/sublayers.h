#pragma once
// The sublayers of a decoder block, each with its own norm: attention and MLP. They add their slots and steps
// to the table of the layer that owns them.
//
// Shapes: N tokens of the microbatch, n of them on this rank (sequence_rows), H hidden size, D head size,
// F inner size of the MLP. heads and F count this rank's part (tensor_part()).

#include <optional>

#include "apps/model/layers/context_parallel.h"
#include "apps/model/layers/pre_norm.h"
#include "apps/model/layers/projection.h"
#include "precision/recipe.h"

namespace nrl::model {

class Attention {
 public:
  /// `d_out` is the gradient of `out`, `d_x` the gradient of the incoming stream. `context`: the other ranks
  /// that hold tokens of the sequences, if any.
  Attention(const ModelSpec& spec, const ModelLayout& layout, const precision::Recipe& recipe,
            const AddSlot& add, int layer, const LayerParameters& p, Stream in, Slot d_out,
            StreamGradient d_x, std::optional<ContextParallel> context = std::nullopt);
  void forward(Run& r);
  void backward(Run& r);

  Stream stream() const {
    return {.x = out_, .residual = norm_.sum, .layer = layer_, .site = DropoutSite::attention};
  }
  /// The producer of d_out writes its amax here (largest_gradient()).
  Slot d_out_amax() const { return d_out_amax_; }

 private:
  /// Views of the fused projection (or of its normalized and rotated copy) by head.
  struct Heads {
    Tensor q, k, v;
  };
  Heads heads(const Run& r) const;
  /// The steps that round attention's operands to FP8, if it reads FP8.
  void quantize_operands(Run& r);
  /// The heads as attention reads them in training and evaluation: in FP8, if the recipe says so.
  Heads operands(const Run& r) const;
  Reads operand_reads() const;
  /// The steps of the gradients of q, k and v.
  void dgrad(Run& r);
  Tensor lse(const Run& r) const;
  /// The rank's heads among all.
  ops::HeadSlice slice(const Run& r) const;
  void rotate(Run& r) const;
  void attend(Run& r) const;
  void attend_to_cache(Run& r) const;
  void attend_backward(Run& r) const;
  void attend_across_ranks(Run& r) const;
  void attend_across_ranks_backward(Run& r) const;
  void rotate_backward(Run& r) const;
  /// True if the scale of d_qkv needs its amax, RoPE writes all of dq and dk, and an op reads dv alone
  /// (ops::QuantizeSource).
  bool measures_rotated() const;

  const ModelSpec& spec_;
  LayerParameters p_;
  int layer_;
  PreNorm norm_;
  Slot d_out_, d_out_amax_;
  StreamGradient d_x_;
  Slot qkv_;            ///< (N, qkv_width)
  Slot qk_;             ///< after RoPE: qkv (N, qkv_width); with QK norm q and k (N, q_width + kv_width)
  Slot keys_, values_;  ///< the slots from which attention reads q and k (keys_) and v: qk_ or qkv_
  Slot qk_stats_;       ///< (N, heads + kv_heads) f32, with QK norm
  Slot attn_;           ///< (N, heads * D)
  Slot lse_;            ///< (heads, N) f32; with context parallelism what its backward pass reads
  Slot exchange_;       ///< (N, forward_width()) u8, context parallelism: memory of its forward pass
  Slot out_;            ///< (n, H), not yet added to the residual stream
  Slot d_proj_;         ///< (n, H): gradient of the dropout's input; unset without dropout
  Slot d_attn_, d_qkv_, d_norm_;  ///< (N, heads * D), (N, qkv_width), (n, H)
  Slot d_qkv_amax_;               ///< (1) f32; unset if no op computes the amax of d_qkv
  Slot d_exchange_;  ///< (N, backward_width()) u8, context parallelism: memory of its backward pass
  std::optional<ColumnInput> input_;  ///< of qkv
  std::optional<RowOutput> output_;   ///< of the projection
  Projection qkv_proj_, o_proj_;
  QuantizedOperand q_, k_, v_, d_out_heads_;  ///< FP8 operands of attention, if it reads FP8
  std::optional<ContextParallel> context_;
};

class Mlp {
 public:
  /// `fuse_gelu`: GELU is computed in the epilogue of the first GEMM, which changes the list of steps; not
  /// where a GEMM reads FP8.
  Mlp(const ModelSpec& spec, const ModelLayout& layout, const precision::Recipe& recipe, const AddSlot& add,
      int layer, const LayerParameters& p, Stream in, bool fuse_gelu, Slot d_out, StreamGradient d_x);
  void forward(Run& r);
  void backward(Run& r);

  Stream stream() const {
    return {.x = out_, .residual = norm_.sum, .layer = layer_, .site = DropoutSite::mlp};
  }
  /// Port for the amax of d_out (largest_gradient()).
  Slot d_out_amax() const { return d_out_amax_; }

 private:
  const ModelSpec& spec_;
  LayerParameters p_;
  int layer_;
  bool fuse_gelu_;
  PreNorm norm_;
  Slot d_out_, d_out_amax_;
  StreamGradient d_x_;
  Slot in_;      ///< (N, mlp_in_width): [gate, up] when gated
  Slot act_;     ///< (N, F); unset where it is rounded to FP8 when it is computed
  Slot out_;     ///< (n, H), not yet added to the residual stream
  Slot d_proj_;  ///< (n, H): gradient of the dropout's input; unset without dropout
  Slot d_act_;   ///< (N, F); unset if GELU is fused
  Slot d_in_;    ///< (N, mlp_in_width); unset where it is rounded to FP8 when it is computed
  Slot d_norm_;  ///< (n, H)
  std::optional<ColumnInput> input_;  ///< of the first matrix
  std::optional<RowOutput> output_;   ///< of the second
  Projection in_proj_, out_proj_;
};

}  // namespace nrl::model
