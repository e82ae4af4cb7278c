#pragma once
// The activation between two linear layers: y = f(x), or f(gate) * up of the halves of x.

#include "apps/model/linear/linear.h"

namespace nrl::model {

struct Activation {
  const char* name = "activation";  ///< of its steps
  ops::Activation kind = ops::Activation::none;
  bool gated = false;
  const GroupedRows* groups = nullptr;  ///< the rows of experts
  Slot in = {};                         ///< (N, F), gated (N, 2F)
  Slot out = {};       ///< (N, F); unset where the next layer computes it as it rounds it to FP8
  Slot d_out = {};     ///< (N, F)
  Slot d_in = {};      ///< like in; unset where the layer before computes it as it rounds it to FP8
  bool fused = false;  ///< computed in the GEMMs of the layers, which have its steps
  /// backward() can write `out` as well, instead of a recomputation (remade_over()).
  bool remakes = false;

  Value output() const { return out ? Value{out} : Value{.slot = in, .activation = kind, .gated = gated}; }
  Value gradient() const {
    return d_in ? Value{d_in} : Value{.slot = in, .activation = kind, .gated = gated, .d_out = d_out};
  }
  void forward(Run& r) const;
  void backward(Run& r) const;
  /// In a step: `to` = the activation of `in`.
  void compute(const Run& r, Slot to) const;
};

}  // namespace nrl::model
