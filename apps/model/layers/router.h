#pragma once
// The router of a mixture of experts: which experts get a token, and with what weights; and the losses that
// keep experts balanced (core/ops/router.h).
//
// Shapes: n tokens on this rank (sequence_rows), E experts, k of them per token (top_k), H hidden size.

#include "apps/model/layers/expert_dispatch.h"

namespace nrl::model {

class Router {
 public:
  /// `x` (n, H) is its input, `d_x` the gradient. `segments`: parts of a microbatch in which experts are
  /// balanced.
  Router(const LayerBuilder& b, const LayerParameters& p, int64_t segments, Slot x, Slot d_x);

  Slot choice() const { return choice_; }
  Slot prob() const { return prob_; }
  Slot d_prob() const { return d_prob_; }

  void forward(Run& r) const;
  /// Sets d_x: the gradients of the router and of the dispatch (+ `addend`, which may be d_x or unset).
  void backward(Run& r, const ExpertDispatch& dispatch, Slot addend) const;

 private:
  Tensor expert(const Run& r) const;
  Tensor counts(const Run& r) const;
  /// This rank's tokens among those that the losses are computed over (ops::RouterBalance).
  struct Tokens {
    int64_t first, segment, total;
  };
  Tokens tokens(const Run& r) const;
  /// Counts the tokens of each expert: with an auxiliary loss in counts_, of all ranks of the microbatch,
  /// else this rank's in LayerContext::expert_counts.
  void count(const Run& r) const;

  const ModelSpec& spec_;
  int layer_;
  int64_t expert_layer_, expert_layers_;  ///< index among this rank's layers with experts, and their number
  int weight_, bias_;
  int64_t segments_;
  Slot x_, d_x_;
  Slot logits_;             ///< (n, E) f32
  Slot choice_;             ///< (n, 2k) i32: experts (n, k), then their rows (n, k)
  Slot prob_;               ///< (n, k) f32
  Slot counts_;             ///< (1, segments E) i32: tokens of each expert by segment, of all ranks; unset
                            ///< without an auxiliary loss
  Slot d_prob_, d_logits_;  ///< (n, k) f32, (n, E)
};

}  // namespace nrl::model
