#include "apps/model/layers/moe.h"

#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::model {

using memory::training;
using precision::Gemm;
using precision::Role;

namespace {

/// The choice of a shared expert: one, weighted by the sigmoid of its logit.
constexpr ops::RouterRule gate_rule{.top_k = 1, .score = ops::RouterScore::sigmoid};

}  // namespace

parallel::GroupId batch_ranks(int tensor) {
  return tensor > 1 ? parallel::group::tp_dp_cp : parallel::group::dp_cp;
}

Moe::Moe(const ModelSpec& m, const ModelLayout& layout, const precision::Recipe& recipe, const AddSlot& add,
         int layer, const LayerParameters& p, Stream in, int64_t segments, Slot d_out, StreamGradient d_x)
    : spec_(m),
      p_(p),
      layer_(layer),
      expert_layer_(held_expert_layers(m, layout, layer)),
      expert_layers_(held_expert_layers(m, layout, m.layers)),
      segments_(segments),
      norm_(m, recipe, add, in, p.norm2, p.norm2_bias),
      d_out_(d_out),
      d_x_(d_x) {
  const MoeSpec& moe = m.moe;
  const int64_t k = moe.rule.top_k;
  const DType activations = recipe.activations(), gradients = recipe.gradients();
  const auto own = [&](std::string_view name, int64_t width, DType dtype) {
    return add({.name = name, .width = width, .dtype = dtype, .rows = sequence_rows});
  };
  const auto dispatched = [&](std::string_view name, int64_t width, DType dtype,
                              std::string_view rules = "") {
    return add({.name = name, .width = width, .dtype = dtype, .rows = dispatched_rows, .rules = rules});
  };
  logits_ = own("router logits", moe.experts, DType::f32);
  choice_ = own("experts of tokens", 2 * k, DType::i32);
  prob_ = own("router weights", k, DType::f32);
  if (moe.has_aux_loss())
    counts_ =
        add({.name = "expert counts", .width = segments * moe.experts, .dtype = DType::i32, .rows = one_row});
  rows_ = dispatched("dispatched", m.hidden, activations, dispatch_rules(layout));
  in_ = dispatched("experts_in", 2 * moe.ffn, activations, "moe");
  const bool keeps_act = !recipe.quantizes(layer, Gemm::experts_out);
  if (keeps_act) act_ = dispatched("expert activation", moe.ffn, activations, "activation moe");
  y_ = dispatched("experts_out", m.hidden, activations);
  out_ = own("moe", m.hidden, activations);
  if (m.residual_dropout > 0) d_proj_ = own("d_moe", m.hidden, gradients);
  d_y_ = dispatched("d_experts_out", m.hidden, gradients);
  d_act_ = dispatched("d_expert_activation", moe.ffn, gradients);
  d_gated_ = dispatched("d_weighted_activation", moe.ffn, gradients);
  gated_ = dispatched("weighted_activation", moe.ffn, activations);
  d_prob_ = own("d_router_weights", k, DType::f32);
  d_logits_ = own("d_router_logits", moe.experts, gradients);
  d_rows_ = dispatched("d_dispatched", m.hidden, gradients);
  d_norm_ = own("d_norm2", m.hidden, gradients);
  dispatch_ = expert_dispatch(m, layout, recipe, add,
                              {.x = norm_.out,
                               .choice = choice_,
                               .prob = prob_,
                               .d_prob = d_prob_,
                               .rows = rows_,
                               .y = y_,
                               .d_out = d_proj_ ? d_proj_ : d_out,
                               .d_y = d_y_,
                               .d_rows = d_rows_});
  in_proj_ = Projection(recipe, add,
                        {.layer = layer,
                         .gemm = Gemm::experts_in,
                         .weight = p.experts_in,
                         .in = m.hidden,
                         .out = 2 * moe.ffn,
                         .column = true,
                         .rules = dispatch_rules(layout),
                         .experts = dispatch_.get()});
  if (!in_proj_.computes_gradient(true)) d_in_ = dispatched("d_experts_in", 2 * moe.ffn, gradients);
  out_proj_ = Projection(recipe, add,
                         {.layer = layer,
                          .gemm = Gemm::experts_out,
                          .weight = p.experts_out,
                          .in = moe.ffn,
                          .out = m.hidden,
                          .experts = dispatch_.get(),
                          .weighted = true});
  if (moe.shared_ffn == 0) return;
  // All tokens of the microbatch.
  const auto tokens = [&](std::string_view name, int64_t width, DType dtype, std::string_view rules = "") {
    return add({.name = name, .width = width, .dtype = dtype, .rules = rules});
  };
  Shared& s = shared_;
  s.in = tokens("shared_in", 2 * moe.shared_ffn, activations, "moe");
  if (!recipe.quantizes(layer, Gemm::shared_out))
    s.act = tokens("shared activation", moe.shared_ffn, activations, "activation moe");
  s.out = own("shared_out", m.hidden, activations);
  s.d_act = tokens("d_shared_activation", moe.shared_ffn, gradients);
  s.in_proj = Projection(recipe, add,
                         {.layer = layer,
                          .gemm = Gemm::shared_in,
                          .weight = p.shared_in,
                          .in = m.hidden,
                          .out = 2 * moe.shared_ffn,
                          .column = true,
                          .gathers = gathers_fp8(m, layout, recipe, layer, Gemm::shared_in),
                          .rules = layout.sequence_parallel ? gather_rule : "norm"});
  if (!s.in_proj.computes_gradient(true)) s.d_in = tokens("d_shared_in", 2 * moe.shared_ffn, gradients);
  s.out_proj = Projection(recipe, add,
                          {.layer = layer,
                           .gemm = Gemm::shared_out,
                           .weight = p.shared_out,
                           .in = moe.shared_ffn,
                           .out = m.hidden,
                           .gathers = gathers_fp8(m, layout, recipe, layer, Gemm::shared_out),
                           .rules = moe.shared_gate ? "" : "activation moe",
                           .weighted = moe.shared_gate});
  s.input.emplace(layout, CommOverlap{}, add, norm_.out, d_norm_, m.hidden, activations, gradients,
                  s.in_proj.gathers());
  s.output.emplace(layout, CommOverlap{}, add, s.out, d_proj_ ? d_proj_ : d_out_, m.hidden, activations,
                   gradients, s.out_proj.gathers());
  d_out_amax_ = largest_gradient(add, s.out_proj, *s.output, d_out_, true);
  if (!moe.shared_gate) return;
  s.logit = tokens("shared gate", 1, DType::f32);
  s.expert = tokens("shared gate's choice", 1, DType::i32);
  s.prob = tokens("shared gate's weight", 1, DType::f32);
  s.d_gated = tokens("d_weighted_shared", moe.shared_ffn, gradients);
  s.gated = tokens("weighted_shared", moe.shared_ffn, activations);
  s.d_prob = tokens("d_shared_weight", 1, DType::f32);
  s.d_logit = tokens("d_shared_gate", 1, gradients);
}

Tensor Moe::expert(const Run& r) const {
  const Tensor t = r[choice_];
  return make_tensor(t.data, DType::i32, {t.dim(0), t.dim(1) / 2}, t.device);
}

Tensor Moe::counts(const Run& r) const {
  if (!counts_) return {};
  const Tensor t = r[counts_];
  return make_tensor(t.data, DType::i32, {segments_, spec_.moe.experts}, t.device);
}

void Moe::activate(const Run& r, const Tensor& in, const Tensor& act) const {
  ops::activation_forward(r.exec(), {.kind = spec_.activation, .gated = true, .x = in, .out = act});
}

void Moe::activate_backward(const Run& r, const Tensor& d_act, const Tensor& in, const Tensor& d_in) const {
  ops::activation_backward(r.exec(),
                           {.kind = spec_.activation, .gated = true, .dout = d_act, .x = in, .dx = d_in});
}

void Moe::weight_gradient(const Run& r, Slot dout, Slot x, int parameter) const {
  ops::linear_backward_weight(
      r.exec(),
      {.dout = r[dout], .x = r[x], .dweight = r.grad(parameter), .accumulate = r.accumulates(parameter)});
  r.gradient_ready({parameter});
}

void Moe::forward(Run& r) {
  const MoeSpec& m = spec_.moe;
  norm_.forward(r);
  // Where tokens go is decided once: it is small, and later steps add to it.
  r.step(decide_once, "router", reads(norm_.out), writes(logits_, choice_, prob_), [&] {
    ops::linear_forward(r.exec(), {.x = r[norm_.out], .weight = r.weight(p_.router), .out = r[logits_]});
    ops::router_forward(r.exec(), {.rule = m.rule,
                                   .logits = r[logits_],
                                   .bias = r.weight(p_.router_bias),
                                   .expert = expert(r),
                                   .prob = r[prob_]});
  });
  r.step(training, "router_balance", reads(logits_, choice_), writes(counts_), [&] {
    count(r);
    const Tensor& metrics = r.context().router_metrics;
    const Tokens t = tokens(r);
    if (metrics)
      ops::router_balance(r.exec(),
                          {.rule = m.rule,
                           .logits = r[logits_],
                           .counts = counts(r),
                           .first = t.first,
                           .segment = t.segment,
                           .total = t.total,
                           .share = r.context().batch_share / static_cast<float>(spec_.expert_layers()),
                           .load = r.layout().tensor_rank == 0 && r.layout().context_rank == 0,
                           .metrics = metrics});
  });
  dispatch_->route(r);
  r.rounds(dispatch_->rounds(r), dispatch_->most_rounds(), dispatch_->carried(), [&] { experts_forward(r); });
  if (shared_.in) shared_forward_out(r);
  const ExpertDispatch::Uses& uses = dispatch_->combine_uses;
  r.step("combine", reads(shared_.out, shared_.prob) | uses.reads, writes(out_).with(uses.writes), [&] {
    Tensor addend = r[shared_.out];
    if (shared_.prob) {
      ops::unpermute(r.exec(), {.x = addend, .prob = shared_prob(r), .out = r[out_]});
      addend = r[out_];
    }
    dispatch_->combine(r, addend, r[out_]);
  });
}

void Moe::experts_forward(Run& r) {
  dispatch_->start_dispatch(r);
  if (shared_.in) r.once([&] { shared_forward_in(r); });
  dispatch_->finish_dispatch(r);
  in_proj_.quantize_input(r, {rows_});
  r.step("experts_in", in_proj_.input_reads(rows_), writes(in_),
         [&] { in_proj_.multiply(r, rows_, rows(r, in_)); });
  if (act_)
    r.step("expert_activation", reads(in_), writes(act_), [&] { activate(r, rows(r, in_), rows(r, act_)); });
  out_proj_.quantize_input(r, {in_, spec_.activation, true});
  r.step("experts_out", out_proj_.input_reads(act_), writes(y_),
         [&] { out_proj_.multiply(r, act_, rows(r, y_)); });
  dispatch_->give_back(r);
}

Tensor Moe::shared_prob(const Run& r) const {
  const Tensor all = r[shared_.prob];
  const int64_t n = all.dim(0), ranks = r.layout().sequence_parallel ? r.layout().tensor : 1;
  return all.rows(n / ranks * (ranks > 1 ? r.layout().tensor_rank : 0), n / ranks);
}

Moe::Tokens Moe::tokens(const Run& r) const {
  // A context-parallel rank has an equal part of every sequence, a tensor-parallel rank the next of its
  // tokens.
  const int64_t own = r[logits_].dim(0), context = r.batch().ids.dim(0);
  NRL_CHECK(context % segments_ == 0, "{} tokens in {} segments", context, segments_);
  return {.first = own < context ? own * r.layout().tensor_rank : 0,
          .segment = context / segments_,
          .total = context * r.layout().context};
}

void Moe::count(const Run& r) const {
  const Tokens t = tokens(r);
  const ModelLayout& layout = r.layout();
  const Tensor& steps = r.context().router_counts;
  const Tensor sum = steps ? steps.rows(layer_, 1) : Tensor{};
  ops::RouterCounts own{
      .expert = expert(r),
      .segment = t.segment,
      .first = t.first,
      .counts = counts(r),
      .sum = steps ? make_tensor(sum.data, DType::i32, {sum.dim(1)}, sum.device) : Tensor{}};
  if (!counts_) {
    own.counts = r.context().expert_counts.rows(r.batch().index * expert_layers_ + expert_layer_, 1);
    own.segment = r.batch().ids.dim(0);
    return ops::router_counts(r.exec(), own);
  }
  ops::router_counts(r.exec(), own);
  if (spec_.moe.aux_tokens == AuxLoss::global && steps) {
    ops::copy(r.exec(), sum, counts(r));
    r.all_reduce(counts(r), batch_ranks(layout.tensor));
  } else if (layout.tensor * layout.context > 1) {
    r.all_reduce(counts(r), microbatch_ranks(layout.tensor, layout.context));
  }
}

void Moe::shared_forward_in(Run& r) {
  const Shared& s = shared_;
  const Slot x = s.input->x;
  s.input->gather(r);
  s.in_proj.quantize_input(r, {x});
  r.step("shared_in", s.in_proj.input_reads(x), writes(s.in), [&] { s.in_proj.multiply(r, x, r[s.in]); });
  if (s.act) r.step("shared_activation", reads(s.in), writes(s.act), [&] { activate(r, r[s.in], r[s.act]); });
  if (!s.prob) return;
  // Every rank computes the gate of all tokens, because the gate's wgrad needs them.
  r.step("shared_gate", reads(x), writes(s.logit, s.expert, s.prob), [&] {
    ops::linear_forward(r.exec(), {.x = r[x], .weight = r.weight(p_.shared_gate), .out = r[s.logit]});
    ops::router_forward(r.exec(),
                        {.rule = gate_rule, .logits = r[s.logit], .expert = r[s.expert], .prob = r[s.prob]});
  });
}

void Moe::shared_forward_out(Run& r) {
  const Shared& s = shared_;
  const Slot partial = s.output->partial;
  s.out_proj.quantize_input(r, {s.in, spec_.activation, true});
  r.step("shared_out", s.out_proj.input_reads(s.act), writes(partial, s.out), [&] {
    s.output->multiply(r, [&](const GemmRows& rows) {
      ops::linear_forward(r.exec(), {.x = rows.input(s.out_proj.input(r, s.act)),
                                     .weight = s.out_proj.weight(r),
                                     .out = rows.output(r[partial])});
    });
  });
}

void Moe::backward(Run& r) {
  const MoeSpec& m = spec_.moe;
  const Slot d_proj = d_proj_ ? d_proj_ : d_out_;
  if (d_proj_)
    r.dgrad("moe_dropout", reads(d_out_), writes(d_proj_),
            [&] { r.drop(r[d_out_], {}, r[d_proj_], spec_.residual_dropout, layer_, DropoutSite::mlp); });
  const ExpertDispatch& d = *dispatch_;
  r.dgrad("combine", reads(d_proj) | d.combine_backward_uses.reads,
          writes().with(d.combine_backward_uses.writes), [&] { d.combine_backward(r, r[d_proj]); });
  r.rounds(d.rounds(r), d.most_rounds(), {}, [&] { experts_backward(r); });
  if (shared_.in) shared_backward_in(r);
  // Adds to the gradient of the shared expert's input.
  const Slot d_shared = shared_.in ? d_norm_ : Slot{};
  r.dgrad("router", reads(choice_, logits_, counts_, d_shared) | d.dispatch_backward_uses.reads,
          writes(d_norm_, d_logits_).with(d.dispatch_backward_uses.writes), [&] {
            const float share = r.context().batch_share;
            const Tokens t = tokens(r);
            d.dispatch_backward(r, r[d_shared], r[d_norm_]);
            ops::router_backward(r.exec(), {.rule = m.rule,
                                            .logits = r[logits_],
                                            .expert = expert(r),
                                            .dprob = r[d_prob_],
                                            .counts = counts(r),
                                            .first = t.first,
                                            .segment = t.segment,
                                            .total = t.total,
                                            .aux = m.aux_loss * share,
                                            .z = m.z_loss * share,
                                            .loss_scale = r.context().loss_scale,
                                            .dlogits = r[d_logits_]});
            ops::linear_backward_data(
                r.exec(),
                {.dout = r[d_logits_], .weight = r.weight(p_.router), .dx = r[d_norm_], .accumulate = true});
          });
  r.wgrad("router", reads(d_logits_, norm_.out),
          [&] { weight_gradient(r, d_logits_, norm_.out, p_.router); });
  norm_.backward(r, d_norm_, d_out_, d_x_);
}

void Moe::experts_backward(Run& r) {
  const ExpertDispatch& d = *dispatch_;
  d.start_dispatch_gradient(r);
  if (shared_.in) r.once([&] { shared_backward_out(r); });
  d.finish_dispatch_gradient(r);
  out_proj_.quantize_gradient(r, {d_y_});
  r.dgrad("experts_out", out_proj_.gradient_reads(d_y_), writes(d_act_),
          [&] { out_proj_.multiply_gradient(r, d_y_, rows(r, d_act_)); });
  // The weights of the router, applied at the input of the GEMM: its output was not kept. Nor is the
  // activation where the GEMM reads it in FP8.
  const Reads activation = act_ ? reads(act_) : reads(in_);
  const Writes weighted =
      act_ ? writes(over(d_gated_, d_act_), over(gated_, act_)) : writes(over(d_gated_, d_act_), gated_);
  r.dgrad("router_weights", reads(d_act_) | activation | d.gate_uses.reads, weighted.with(d.gate_uses.writes),
          [&] {
            const ExpertDispatch::Gate gate = d.gate(r);
            if (!act_) activate(r, rows(r, in_), rows(r, gated_));
            ops::gate_backward(r.exec(), {.dact = rows(r, d_act_),
                                          .act = rows(r, act_ ? act_ : gated_),
                                          .prob = gate.prob,
                                          .row = gate.row,
                                          .dprob = gate.d_prob,
                                          .dact_out = rows(r, d_gated_),
                                          .act_out = rows(r, gated_)});
          });
  out_proj_.quantize_weighted(r, gated_);
  out_proj_.wgrad(r, "experts_out", d_y_, gated_);
  if (d_in_)
    r.dgrad("expert_activation", reads(d_gated_, in_), writes(over(d_in_, in_)),
            [&] { activate_backward(r, rows(r, d_gated_), rows(r, in_), rows(r, d_in_)); });
  in_proj_.quantize_gradient(r, stored_or(d_in_, {in_, spec_.activation, true, d_gated_}));
  r.dgrad("experts_in", in_proj_.gradient_reads(d_in_), writes(d_rows_),
          [&] { in_proj_.multiply_gradient(r, d_in_, rows(r, d_rows_)); });
  d.give_back_gradient(r);
  in_proj_.wgrad(r, "experts_in", d_in_, rows_);
}

void Moe::shared_backward_out(Run& r) {
  const Shared& s = shared_;
  const Slot d_proj = s.output->d_full;
  s.output->gather(r);
  s.out_proj.quantize_gradient(r, {.slot = d_proj, .amax = d_out_amax_});
  r.dgrad("shared_out", s.out_proj.gradient_reads(d_proj), writes(s.d_act),
          [&] { s.out_proj.multiply_gradient(r, d_proj, r[s.d_act]); });
  if (s.prob) {
    const Writes weighted = s.act ? writes(over(s.d_gated, s.d_act), over(s.gated, s.act))
                                  : writes(over(s.d_gated, s.d_act), s.gated);
    r.dgrad("shared_weight", reads(s.d_act, s.act ? s.act : s.in, s.prob, s.logit, s.expert),
            weighted.with(s.d_prob.bit() | s.d_logit.bit()), [&] {
              if (!s.act) activate(r, r[s.in], r[s.gated]);
              ops::gate_backward(r.exec(), {.dact = r[s.d_act],
                                            .act = r[s.act ? s.act : s.gated],
                                            .prob = r[s.prob],
                                            .dprob = r[s.d_prob],
                                            .dact_out = r[s.d_gated],
                                            .act_out = r[s.gated]});
              ops::router_backward(r.exec(), {.rule = gate_rule,
                                              .logits = r[s.logit],
                                              .expert = r[s.expert],
                                              .dprob = r[s.d_prob],
                                              .dlogits = r[s.d_logit]});
            });
    s.out_proj.quantize_weighted(r, s.gated);
  }
  s.out_proj.wgrad(r, "shared_out", d_proj, s.prob ? s.gated : s.act);
}

void Moe::shared_backward_in(Run& r) {
  const Shared& s = shared_;
  const Slot x = s.input->x, d_x = s.input->d_x, d_act = s.prob ? s.d_gated : s.d_act;
  if (s.d_in)
    r.dgrad("shared_activation", reads(d_act, s.in), writes(over(s.d_in, s.in)),
            [&] { activate_backward(r, r[d_act], r[s.in], r[s.d_in]); });
  s.in_proj.quantize_gradient(r, stored_or(s.d_in, {s.in, spec_.activation, true, d_act}));
  r.dgrad("shared_in", s.in_proj.gradient_reads(s.d_in) | reads(s.d_logit), writes(d_x, d_norm_), [&] {
    s.in_proj.multiply_gradient(r, s.d_in, r[d_x]);
    if (s.prob)
      ops::linear_backward_data(
          r.exec(),
          {.dout = r[s.d_logit], .weight = r.weight(p_.shared_gate), .dx = r[d_x], .accumulate = true});
    s.input->reduce(r);
  });
  s.in_proj.wgrad(r, "shared_in", s.d_in, x);
  if (s.prob)
    r.wgrad("shared_gate", reads(s.d_logit, x), [&] { weight_gradient(r, s.d_logit, x, p_.shared_gate); });
}

}  // namespace nrl::model
