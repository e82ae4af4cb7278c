#pragma once
// The norm before a sublayer, with the addition of the residual stream fused in. Where only GEMMs of this
// rank read its output, and in FP8, the output is not stored: it is computed again where it is rounded, from
// the residual stream and the norm's statistics, which the backward pass keeps anyway.
//
// Shapes: n tokens of this rank (sequence_rows), H hidden size.

#include "apps/model/linear/value.h"

namespace nrl::model {

/// The residual stream between sublayers: `x` (n, H), still to be added to `residual` (n, H) with the dropout
/// of (layer, site). Without residual, x is the whole stream.
struct Stream {
  Slot x, residual;
  int layer;
  DropoutSite site;
};

/// The gradient of a residual stream, `slot` (n, H), and its amax; a norm writes both. `amax` (1) f32: unset
/// if no GEMM reads it.
struct StreamGradient {
  Slot slot;
  Slot amax = {};
};

/// Zeroes an amax slot and returns it as (1) f32; empty if the slot is unset.
Tensor zero_amax(const Run& r, Slot amax);

/// sum = dropout(x) + residual; out = norm(sum). The first step of every sublayer and of the head.
class PreNorm {
 public:
  /// `weight` and `bias` are parameters. `stored`: whether out is a slot. Else its reader computes it from
  /// source().
  PreNorm(const LayerBuilder& b, Stream in, int weight, int bias, bool stored = true);
  /// The forward steps; returns the output. `amax`: gets the amax of an output that is not stored, (1) f32;
  /// may be unset.
  Value forward(Run& r, Slot amax = {}) const;
  /// d_x = gradient of the norm (+ d_residual: the gradient of the skip connection).
  void backward(Run& r, Slot d_out, Slot d_residual, StreamGradient d_x) const;

  Reads reads_of_source() const { return reads(sum, stats_); }
  /// out, for a step with reads_of_source().
  ops::QuantizeSource source(const Run& r) const;

  Slot sum;  ///< (n, H)
  Slot out;  ///< (n, H); unset if it is not stored

 private:
  struct Statistics {
    Tensor mean, rstd;  ///< (n) f32; mean of LayerNorm only
  };
  Statistics statistics(const Run& r) const;

  Stream in_;
  int weight_, bias_;
  Slot stats_;  ///< saved statistics (n, 1 or 2) f32: mean (LayerNorm), then rstd, each contiguous
};

}  // namespace nrl::model
