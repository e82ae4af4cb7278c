#include "apps/model/layers/router.h"

#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::model {

Router::Router(const LayerBuilder& b, const LayerParameters& p, int64_t segments, Slot x, Slot d_x)
    : spec_(b.spec),
      layer_(b.layer),
      expert_layer_(held_expert_layers(b.spec, b.layout, b.layer)),
      expert_layers_(held_expert_layers(b.spec, b.layout, b.spec.layers)),
      weight_(p.router),
      bias_(p.router_bias),
      segments_(segments),
      x_(x),
      d_x_(d_x) {
  const MoeSpec& moe = b.spec.moe;
  const int64_t k = moe.rule.top_k;
  const auto own = [&](std::string_view name, int64_t width, DType dtype) {
    return b.add({.name = name, .width = width, .dtype = dtype, .rows = sequence_rows});
  };
  logits_ = own("router logits", moe.experts, DType::f32);
  choice_ = own("experts of tokens", 2 * k, DType::i32);
  prob_ = own("router weights", k, DType::f32);
  if (moe.has_aux_loss())
    counts_ = b.add(
        {.name = "expert counts", .width = segments * moe.experts, .dtype = DType::i32, .rows = one_row});
  d_prob_ = own("d_router_weights", k, DType::f32);
  d_logits_ = own("d_router_logits", moe.experts, b.recipe.gradients());
}

Tensor Router::expert(const Run& r) const {
  const Tensor t = r[choice_];
  return make_tensor(t.data, DType::i32, {t.dim(0), t.dim(1) / 2}, t.device);
}

Tensor Router::counts(const Run& r) const {
  if (!counts_) return {};
  const Tensor t = r[counts_];
  return make_tensor(t.data, DType::i32, {segments_, spec_.moe.experts}, t.device);
}

void Router::forward(Run& r) const {
  const MoeSpec& m = spec_.moe;
  // Where tokens go is decided once: it is small, and later steps add to it.
  r.step(decide_once, "router", reads(x_), writes(logits_, choice_, prob_), [&] {
    ops::linear_forward(r.exec(), {.x = r[x_], .weight = r.weight(weight_), .out = r[logits_]});
    ops::router_forward(r.exec(), {.rule = m.rule,
                                   .logits = r[logits_],
                                   .bias = r.weight(bias_),
                                   .expert = expert(r),
                                   .prob = r[prob_]});
  });
  r.step(memory::training, "router_balance", reads(logits_, choice_), writes(counts_), [&] {
    count(r);
    const Tensor& metrics = r.context().router_metrics;
    const Tokens t = tokens(r);
    if (metrics)
      ops::router_balance(r.exec(), {.rule = m.rule,
                                     .logits = r[logits_],
                                     .counts = counts(r),
                                     .first = t.first,
                                     .segment = t.segment,
                                     .total = t.total,
                                     .share = r.batch().share / static_cast<float>(spec_.expert_layers()),
                                     .load = r.layout().tensor_rank == 0 && r.layout().context_rank == 0,
                                     .metrics = metrics});
  });
}

Router::Tokens Router::tokens(const Run& r) const {
  // A context-parallel rank has an equal part of every sequence, a tensor-parallel rank the next of its
  // tokens.
  const int64_t own = r[logits_].dim(0), context = r.batch().ids.dim(0);
  NRL_CHECK(context % segments_ == 0, "{} tokens in {} segments", context, segments_);
  return {.first = own < context ? own * r.layout().tensor_rank : 0,
          .segment = context / segments_,
          .total = context * r.layout().context};
}

void Router::count(const Run& r) const {
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

void Router::backward(Run& r, const ExpertDispatch& dispatch, Slot addend) const {
  const MoeSpec& m = spec_.moe;
  r.dgrad("router", reads(choice_, logits_, counts_, addend) | dispatch.dispatch_backward_uses.reads,
          writes(d_x_, d_logits_).with(dispatch.dispatch_backward_uses.writes), [&] {
            const float share = r.batch().share;
            const Tokens t = tokens(r);
            dispatch.dispatch_backward(r, r[addend], r[d_x_]);
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
                {.dout = r[d_logits_], .weight = r.weight(weight_), .dx = r[d_x_], .accumulate = true});
          });
  if (!r.context().trains(weight_)) return;
  r.wgrad("router", reads(d_logits_, x_), [&] {
    ops::linear_backward_weight(
        r.exec(),
        {.dout = r[d_logits_], .x = r[x_], .dweight = r.grad(weight_), .accumulate = r.accumulates(weight_)});
    r.gradient_ready({weight_});
  });
}

}  // namespace nrl::model
