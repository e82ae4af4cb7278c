#pragma once
// The sublayer with a mixture of experts in place of an MLP. A router sends every token to top_k experts,
// each a gated MLP, and adds up their outputs with weights. A model may add a shared expert, an MLP that all
// tokens pass.
//
// A rank routes its part of the residual stream to its own experts, or to experts on other ranks
// (expert_dispatch.h). The shared expert is split over the tensor-parallel ranks like an MLP. They need
// sequence parallelism: the shared expert's partial outputs are summed, the experts' outputs are not.
//
// Shapes: N tokens of the microbatch, n of them on this rank (sequence_rows), H hidden size, E experts, k of
// them per token (top_k), R rows in the order of this rank's experts (dispatched_rows), F this rank's part of
// the inner size of an expert and S of the shared expert.

#include <memory>

#include "apps/model/layers/expert_dispatch.h"
#include "apps/model/layers/projection.h"
#include "apps/model/layers/sublayers.h"

namespace nrl::model {

/// microbatch_ranks() of all data-parallel ranks.
parallel::GroupId batch_ranks(int tensor);

class Moe {
 public:
  /// `d_out` is the gradient of `out`, `d_x` the gradient of the incoming stream.
  Moe(const ModelSpec& spec, const ModelLayout& layout, const precision::Recipe& recipe, const AddSlot& add,
      int layer, const LayerParameters& p, Stream in, int64_t segments, Slot d_out, StreamGradient d_x);
  void forward(Run& r);
  void backward(Run& r);
  int64_t host_values() const { return dispatch_->host_values(); }

  Stream stream() const {
    return {.x = out_, .residual = norm_.sum, .layer = layer_, .site = DropoutSite::mlp};
  }
  /// Port for the amax of d_out, which the shared expert reads (largest_gradient()).
  Slot d_out_amax() const { return d_out_amax_; }

 private:
  /// An MLP for every token, weighted by a router of one expert where it has a gate.
  struct Shared {
    Slot in;                   ///< (N, 2S): [gate, up]
    Slot act;                  ///< (N, S); unset where it is rounded to FP8 when it is computed
    Slot out;                  ///< (n, H), not yet weighted
    Slot logit, expert, prob;  ///< (N, 1) of the gate: f32, i32 (zeros), f32
    Slot d_act;                ///< (N, S), of the unweighted output
    Slot d_gated, gated;       ///< (N, S): d_act and act, weighted
    Slot d_in;                 ///< (N, 2S); unset where it is rounded to FP8 when it is computed
    Slot d_prob, d_logit;      ///< (N, 1) of this rank's part; their sum over the ranks is the gradient
    std::optional<ColumnInput> input;
    std::optional<RowOutput> output;
    Projection in_proj, out_proj;
  };
  Tensor expert(const Run& r) const;
  /// The rows of a slot (R, ...) that are in use.
  Tensor rows(const Run& r, Slot slot) const { return dispatch_->rows(r, slot); }
  Tensor counts(const Run& r) const;
  /// This rank's tokens among those that the router's losses are computed over (ops::RouterBalance).
  struct Tokens {
    int64_t first, segment, total;
  };
  Tokens tokens(const Run& r) const;
  /// Counts the tokens of each expert: with an auxiliary loss in counts_, of all ranks of the microbatch,
  /// else this rank's in LayerContext::expert_counts.
  void count(const Run& r) const;
  /// The steps of the experts' rows, of one round.
  void experts_forward(Run& r);
  void experts_backward(Run& r);
  // The shared expert's steps up to its activation run while the experts' rows or gradients are on their way
  // there, those after it while they return; the backward pass likewise.
  void shared_forward_in(Run& r);
  void shared_forward_out(Run& r);
  void shared_backward_out(Run& r);
  /// Sets d_norm_ to the gradient of the shared expert's input.
  void shared_backward_in(Run& r);
  /// The weights of the shared expert for this rank's part of the tokens.
  Tensor shared_prob(const Run& r) const;
  void activate(const Run& r, const Tensor& in, const Tensor& act) const;
  void activate_backward(const Run& r, const Tensor& d_act, const Tensor& in, const Tensor& d_in) const;
  void weight_gradient(const Run& r, Slot dout, Slot x, int parameter) const;

  const ModelSpec& spec_;
  LayerParameters p_;
  int layer_;
  int64_t expert_layer_, expert_layers_;  ///< index among this rank's layers with experts, and their number
  int64_t segments_;
  PreNorm norm_;
  Slot d_out_, d_out_amax_;
  StreamGradient d_x_;
  Slot logits_;             ///< (n, E) f32
  Slot choice_;             ///< (n, 2k) i32: experts (n, k), then their rows (n, k)
  Slot prob_;               ///< (n, k) f32
  Slot counts_;             ///< (1, segments E) i32: tokens of each expert by segment, of all ranks; unset
                            ///< without an auxiliary loss
  Slot rows_;               ///< (R, H): the normalized tokens
  Slot in_;                 ///< (R, 2F): [gate, up]
  Slot act_;                ///< (R, F); unset where it is rounded to FP8 when it is computed
  Slot y_;                  ///< (R, H), not yet weighted
  Slot out_;                ///< (n, H), not yet added to the residual stream
  Slot d_proj_;             ///< (n, H): gradient of the dropout's input; unset without dropout
  Slot d_y_;                ///< (R, H): gradient of the token's output at each of its rows
  Slot d_act_;              ///< (R, F), of the unweighted output
  Slot d_gated_, gated_;    ///< (R, F): d_act_ and the activation, weighted
  Slot d_prob_, d_logits_;  ///< (n, k) f32, (n, E)
  Slot d_in_;               ///< (R, 2F); unset where it is rounded to FP8 when it is computed
  Slot d_rows_, d_norm_;    ///< (R, H), (n, H)
  Shared shared_;
  std::unique_ptr<ExpertDispatch> dispatch_;
  Projection in_proj_, out_proj_;
};

}  // namespace nrl::model
