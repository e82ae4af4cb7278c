// The sublayer with a mixture of experts in place of an MLP. A router sends every token to top_k experts,
// each a gated MLP, and adds up their outputs with weights. A model may add a shared expert, an MLP that all
// tokens pass.
//
// A rank routes its part of the residual stream to its own experts, or to experts on other ranks
// (expert_dispatch.h). The shared expert is split over the tensor-parallel ranks like an MLP. They need
// sequence parallelism: the shared expert's partial outputs are summed, the experts' outputs are not.
#include "apps/model/layers/activation.h"
#include "apps/model/layers/router.h"
#include "apps/model/layers/shared_expert.h"
#include "apps/model/layers/sublayer.h"
#include "core/ops/kernel_table.h"

namespace nrl::model {
namespace {

using precision::Gemm;

// R rows in the order of this rank's experts (dispatched_rows), F this rank's part of the inner size of an
// expert.
class Moe final : public Sublayer {
 public:
  Moe(const LayerBuilder& b, const LayerParameters& p, const Ends& ends, int64_t segments);
  void forward(Run& r) override;
  void backward(Run& r) override;
  int64_t host_values() const override { return dispatch_->host_values(); }
  Stream stream() const override { return stream_after(norm_); }

 private:
  /// The steps of the experts' rows, of one round.
  void experts_forward(Run& r);
  void experts_backward(Run& r);
  /// Applies the weights of the router at the input of down_: its output was not kept.
  void weight_backward(Run& r);

  PreNorm norm_;
  Slot d_norm_;  ///< (n, H)
  std::optional<Router> router_;
  std::unique_ptr<ExpertDispatch> dispatch_;
  Linear up_, down_;
  Activation activation_;
  Slot rows_;      ///< (R, H): the normalized tokens
  Slot y_;         ///< (R, H), not yet weighted
  Slot d_rows_y_;  ///< (R, H): gradient of the token's output at each of its rows
  Slot d_act_;     ///< (R, F): gradient of the activation before it is weighted
  Slot weighted_;  ///< (R, F): the activation, weighted
  Slot d_rows_;    ///< (R, H)
  std::optional<SharedExpert> shared_;
};

Moe::Moe(const LayerBuilder& b, const LayerParameters& p, const Ends& ends, int64_t segments)
    : Sublayer(b, ends, DropoutSite::mlp), norm_(b, ends.in, p.norm2, p.norm2_bias) {
  const ModelSpec& m = b.spec;
  const MoeSpec& moe = m.moe;
  d_norm_ = b.gradient("d_norm2", m.hidden, sequence_rows);
  router_.emplace(b, p, segments, norm_.out, d_norm_);
  rows_ = b.activation("dispatched", m.hidden, dispatched_rows, dispatch_rules(b.layout));
  y_ = b.activation("experts_out", m.hidden, dispatched_rows);
  add_output(b, "moe", "d_moe");
  d_rows_y_ = b.gradient("d_experts_out", m.hidden, dispatched_rows);
  d_rows_ = b.gradient("d_dispatched", m.hidden, dispatched_rows);
  dispatch_ = expert_dispatch(b, {.x = norm_.out,
                                  .choice = router_->choice(),
                                  .prob = router_->prob(),
                                  .d_prob = router_->d_prob(),
                                  .rows = rows_,
                                  .y = y_,
                                  .d_out = d_y_,
                                  .d_y = d_rows_y_,
                                  .d_rows = d_rows_});
  up_ = Linear(b, {.name = "experts_in",
                   .gemm = Gemm::experts_in,
                   .weight = p.experts_in,
                   .in = m.hidden,
                   .out = 2 * moe.ffn,
                   .rules = dispatch_rules(b.layout),
                   .groups = dispatch_.get()});
  down_ = Linear(b, {.name = "experts_out",
                     .gemm = Gemm::experts_out,
                     .weight = p.experts_out,
                     .in = moe.ffn,
                     .out = m.hidden,
                     .split = Split::inputs,
                     .groups = dispatch_.get(),
                     .weighted = true});
  Activation& a = activation_;
  a = {.name = "expert_activation", .kind = m.activation, .gated = true, .groups = dispatch_.get()};
  a.in = b.activation("experts_in", 2 * moe.ffn, dispatched_rows, "moe");
  if (down_.reads_x()) a.out = b.activation("expert activation", moe.ffn, dispatched_rows, "activation moe");
  d_act_ = b.gradient("d_expert_activation", moe.ffn, dispatched_rows);
  a.d_out = b.gradient("d_weighted_activation", moe.ffn, dispatched_rows);
  weighted_ = b.activation("weighted_activation", moe.ffn, dispatched_rows);
  if (!up_.computes_d_y(true)) a.d_in = b.gradient("d_experts_in", 2 * moe.ffn, dispatched_rows);
  up_.connect(b, {.x = rows_, .y = a.in, .d_y = a.d_in, .d_x = d_rows_});
  down_.connect(b, {.x = a.out, .y = y_, .d_y = d_rows_y_, .d_x = d_act_, .weighted = weighted_});
  if (moe.shared_ffn == 0) return;
  shared_.emplace(b, p, norm_.out, d_norm_, d_y_);
  add_amax(b, shared_->last());
}

void Moe::forward(Run& r) {
  norm_.forward(r);
  router_->forward(r);
  dispatch_->route(r);
  r.rounds(dispatch_->rounds(r), dispatch_->most_rounds(), dispatch_->carried(), [&] { experts_forward(r); });
  if (shared_) shared_->forward_out(r);
  const ExpertDispatch::Uses& uses = dispatch_->combine_uses;
  const Slot shared = shared_ ? shared_->out() : Slot{}, weight = shared_ ? shared_->weight() : Slot{};
  r.step("combine", reads(shared, weight) | uses.reads, writes(out_).with(uses.writes), [&] {
    Tensor addend = r[shared];
    if (weight) {
      ops::unpermute(r.exec(), {.x = addend, .prob = shared_->weight_of(r), .out = r[out_]});
      addend = r[out_];
    }
    dispatch_->combine(r, addend, r[out_]);
  });
}

void Moe::experts_forward(Run& r) {
  dispatch_->start_dispatch(r);
  if (shared_) r.once([&] { shared_->forward_in(r); });
  dispatch_->finish_dispatch(r);
  up_.forward(r, {rows_});
  activation_.forward(r);
  down_.forward(r, activation_.output());
  dispatch_->give_back(r);
}

void Moe::backward(Run& r) {
  output_gradient(r, "moe_dropout");
  const ExpertDispatch& d = *dispatch_;
  r.dgrad("combine", reads(d_y_) | d.combine_backward_uses.reads,
          writes().with(d.combine_backward_uses.writes), [&] { d.combine_backward(r, r[d_y_]); });
  r.rounds(d.rounds(r), d.most_rounds(), {}, [&] { experts_backward(r); });
  if (shared_) shared_->backward_in(r);
  // Adds to the gradient of the shared expert's input.
  router_->backward(r, d, shared_ ? d_norm_ : Slot{});
  norm_.backward(r, d_norm_, ends_.d_out, ends_.d_x);
}

void Moe::experts_backward(Run& r) {
  const ExpertDispatch& d = *dispatch_;
  d.start_dispatch_gradient(r);
  if (shared_) r.once([&] { shared_->backward_out(r, {.slot = d_y_, .amax = d_out_amax_}); });
  d.finish_dispatch_gradient(r);
  down_.dgrad(r, {d_rows_y_});
  weight_backward(r);
  down_.wgrad(r);
  activation_.backward(r);
  up_.dgrad(r, activation_.gradient());
  d.give_back_gradient(r);
  up_.wgrad(r);
}

void Moe::weight_backward(Run& r) {
  const ExpertDispatch& d = *dispatch_;
  const Activation& a = activation_;
  // Where the GEMM reads the activation in FP8, it was not kept either.
  const Writes weighted = a.out ? writes(over(a.d_out, d_act_), over(weighted_, a.out))
                                : writes(over(a.d_out, d_act_), weighted_);
  r.dgrad("router_weights", reads(d_act_, a.out ? a.out : a.in) | d.gate_uses.reads,
          weighted.with(d.gate_uses.writes), [&] {
            const ExpertDispatch::Gate gate = d.gate(r);
            if (!a.out) a.compute(r, weighted_);
            ops::gate_backward(r.exec(), {.dact = d.rows(r, d_act_),
                                          .act = d.rows(r, a.out ? a.out : weighted_),
                                          .prob = gate.prob,
                                          .row = gate.row,
                                          .dprob = gate.d_prob,
                                          .dact_out = d.rows(r, a.d_out),
                                          .act_out = d.rows(r, weighted_)});
          });
}

}  // namespace

std::unique_ptr<Sublayer> mixture_of_experts(const LayerBuilder& b, const LayerParameters& p,
                                             const Sublayer::Ends& ends, int64_t segments) {
  return std::make_unique<Moe>(b, p, ends, segments);
}

}  // namespace nrl::model
