#pragma once
// The shared expert of a mixture: an MLP that all tokens pass, split over the tensor-parallel ranks like any
// other, and weighted by a router of one expert where it has a gate. Its steps up to the activation run while
// the routed experts' rows or gradients are on their way there, those after it while they return.
//
// Shapes: N tokens of the microbatch, n of them on this rank (sequence_rows), H hidden size, S this rank's
// part of the inner size.

#include "apps/model/layers/activation.h"

namespace nrl::model {

class SharedExpert {
 public:
  /// `x` (n, H) is the input, `d_x` its gradient; `d_out` (n, H) the gradient of the mixture's output.
  SharedExpert(const LayerBuilder& b, const LayerParameters& p, Slot x, Slot d_x, Slot d_out);
  /// The layer that reads d_out.
  const Linear& last() const { return down_; }
  Slot out() const { return out_; }           ///< (n, H), not yet weighted
  Slot weight() const { return gate_.prob; }  ///< (N, 1): named by steps that read weight_of()
  /// The weights of this rank's part of the tokens (n, 1).
  Tensor weight_of(const Run& r) const;

  void forward_in(Run& r) const;
  void forward_out(Run& r) const;
  void backward_out(Run& r, const Value& d_out) const;
  /// Sets d_x.
  void backward_in(Run& r) const;

 private:
  /// Every rank computes it of all tokens, because its wgrad needs them.
  struct Gate {
    int parameter = -1;
    Slot logit, choice, prob;  ///< (N, 1): f32, i32 (zeros), f32
    Slot d_prob, d_logit;      ///< (N, 1) of this rank's part; their sum over the ranks is the gradient
    Slot weighted;             ///< (N, S): the activation, weighted
    explicit operator bool() const { return static_cast<bool>(prob); }
  };
  void gate_backward(Run& r) const;

  Linear up_, down_;
  Activation activation_;
  Slot d_act_;  ///< (N, S): gradient of the activation before it is weighted
  Slot out_;
  Gate gate_;
};

}  // namespace nrl::model
