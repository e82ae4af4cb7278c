#pragma once
// The sublayers of a decoder block, each with its own norm: attention and MLP. They add their slots and steps
// to the table of the layer that owns them.
//
// Shapes: N tokens of the microbatch, H hidden size, D head size, F inner size of the MLP.

#include <functional>

#include "apps/model/layer.h"
#include "core/ops/norm.h"
#include "precision/recipe.h"

namespace nrl::model {

/// Adds a slot to the layer's table.
using AddSlot = std::function<Slot(const memory::SlotSpec&)>;

/// The residual stream between sublayers: `x` (N, H) is to be added to `residual` (N, H), with the dropout
/// named by (layer, site). No residual: x is the whole stream.
struct Stream {
  Slot x, residual;
  int layer;
  DropoutSite site;
};

/// sum = dropout(x) + residual; out = norm(sum). The first step of every sublayer and of the head.
class PreNorm {
 public:
  /// `format`: of `out`, as its readers want it.
  PreNorm(const ModelSpec& spec, const precision::Recipe& recipe, const AddSlot& add, Stream in, int weight,
          int bias, precision::Format format);
  void forward(Run& r);
  /// d_x = the norm's gradient (+ d_residual: the gradient that goes past the sublayer).
  void backward(Run& r, Slot d_out, Slot d_residual, Slot d_x);

  Slot sum, out;  ///< (N, H)

 private:
  struct Statistics {
    Tensor mean, rstd;  ///< (N) f32; mean of LayerNorm only
  };
  Statistics statistics(const Run& r) const;

  Stream in_;
  int weight_, bias_;
  Slot stats_;  ///< (N, 1 or 2) f32, planar
};

class Attention {
 public:
  /// `d_out` is the gradient of `out`, `d_x` that of the incoming stream.
  Attention(const ModelSpec& spec, const precision::Recipe& recipe, const AddSlot& add, int layer,
            const LayerParameters& p, Stream in, Slot d_out, Slot d_x);
  void forward(Run& r);
  void backward(Run& r);

  Stream stream() const {
    return {.x = out_, .residual = norm_.sum, .layer = layer_, .site = DropoutSite::attention};
  }

 private:
  /// Columns of the fused projection (or of its normed and rotated copy) as heads.
  struct Heads {
    Tensor q, k, v;
  };
  Heads heads(const Run& r) const;
  Tensor lse(const Run& r) const;
  void rotate(Run& r) const;
  void attend(Run& r) const;
  void attend_to_cache(Run& r) const;
  void attend_backward(Run& r) const;
  void rotate_backward(Run& r) const;

  const ModelSpec& spec_;
  LayerParameters p_;
  int layer_;
  PreNorm norm_;
  Slot d_out_, d_x_;
  Slot qkv_;            ///< (N, qkv_width)
  Slot qk_;             ///< q and k after QK norm and rotation; without QK norm all of a rotated qkv
  Slot keys_, values_;  ///< where attention finds q and k, and v: qk_ or qkv_
  Slot qk_stats_;       ///< (N, heads + kv_heads) f32, with QK norm
  Slot attn_;           ///< (N, heads * D)
  Slot lse_;            ///< (heads, N) f32
  Slot out_;            ///< (N, H), not yet added to the residual stream
  Slot d_proj_;         ///< d_out behind dropout, where there is dropout
  Slot d_attn_, d_qkv_, d_norm_;
};

class Mlp {
 public:
  /// `fuse_gelu`: the activation is made in the epilogue of the first linear layer (another list of steps).
  Mlp(const ModelSpec& spec, const precision::Recipe& recipe, const AddSlot& add, int layer,
      const LayerParameters& p, Stream in, bool fuse_gelu, Slot d_out, Slot d_x);
  void forward(Run& r);
  void backward(Run& r);

  Stream stream() const {
    return {.x = out_, .residual = norm_.sum, .layer = layer_, .site = DropoutSite::mlp};
  }

 private:
  const ModelSpec& spec_;
  LayerParameters p_;
  int layer_;
  bool fuse_gelu_;
  PreNorm norm_;
  Slot d_out_, d_x_;
  Slot in_;      ///< (N, mlp_in_width), gate and up beside each other
  Slot act_;     ///< (N, F)
  Slot out_;     ///< (N, H), not yet added to the residual stream
  Slot d_proj_;  ///< d_out behind dropout, where there is dropout
  Slot d_act_, d_in_, d_norm_;
};

}  // namespace nrl::model
