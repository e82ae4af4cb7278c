#include "apps/model/layers/shared_expert.h"

#include "core/ops/kernel_table.h"

namespace nrl::model {

using precision::Gemm;

namespace {

/// The choice of a shared expert: one, weighted by the sigmoid of its logit.
constexpr ops::RouterRule gate_rule{.top_k = 1, .score = ops::RouterScore::sigmoid};

}  // namespace

SharedExpert::SharedExpert(const LayerBuilder& b, const LayerParameters& p, Slot x, Slot d_x, Slot d_out)
    : up_(b, {.name = "shared_in",
              .gemm = Gemm::shared_in,
              .weight = p.shared_in,
              .in = b.spec.hidden,
              .out = 2 * b.spec.moe.shared_ffn,
              .rules = "norm",
              .shares_x = b.spec.moe.shared_gate,
              .overlaps = false}),
      down_(b, {.name = "shared_out",
                .gemm = Gemm::shared_out,
                .weight = p.shared_out,
                .in = b.spec.moe.shared_ffn,
                .out = b.spec.hidden,
                .split = Split::inputs,
                .rules = b.spec.moe.shared_gate ? "" : "activation moe",
                .weighted = b.spec.moe.shared_gate,
                .overlaps = false}) {
  const ModelSpec& m = b.spec;
  const int64_t inner = m.moe.shared_ffn;
  const bool gated = m.moe.shared_gate;
  Activation& a = activation_;
  a = {.name = "shared_activation", .kind = m.activation, .gated = true};
  a.in = b.activation("shared_in", 2 * inner, token_rows, "moe");
  if (down_.reads_x()) a.out = b.activation("shared activation", inner, token_rows, "activation moe");
  out_ = b.activation("shared_out", m.hidden, sequence_rows);
  d_act_ = b.gradient("d_shared_activation", inner, token_rows);
  a.d_out = gated ? b.gradient("d_weighted_shared", inner, token_rows) : d_act_;
  if (!up_.computes_d_y(true)) a.d_in = b.gradient("d_shared_in", 2 * inner, token_rows);
  if (gated) {
    const auto number = [&](std::string_view name, DType dtype) {
      return b.add({.name = name, .width = 1, .dtype = dtype});
    };
    gate_ = {.parameter = p.shared_gate,
             .logit = number("shared gate", DType::f32),
             .choice = number("shared gate's choice", DType::i32),
             .prob = number("shared gate's weight", DType::f32),
             .d_prob = number("d_shared_weight", DType::f32),
             .d_logit = number("d_shared_gate", b.recipe.gradients()),
             .weighted = b.activation("weighted_shared", inner, token_rows)};
  }
  up_.connect(b, {.x = x, .y = a.in, .d_y = a.d_in, .d_x = d_x});
  down_.connect(b, {.x = a.out, .y = out_, .d_y = d_out, .d_x = d_act_, .weighted = gate_.weighted});
}

Tensor SharedExpert::weight_of(const Run& r) const {
  const Tensor all = r[gate_.prob];
  const int64_t n = r[out_].dim(0);
  return all.rows(n < all.dim(0) ? n * r.layout().tensor_rank : 0, n);
}

void SharedExpert::forward_in(Run& r) const {
  up_.forward(r, {up_.x()});
  activation_.forward(r);
  if (!gate_) return;
  r.step("shared_gate", reads(up_.x()), writes(gate_.logit, gate_.choice, gate_.prob), [&] {
    ops::linear_forward(r.exec(),
                        {.x = r[up_.x()], .weight = r.weight(gate_.parameter), .out = r[gate_.logit]});
    ops::router_forward(
        r.exec(),
        {.rule = gate_rule, .logits = r[gate_.logit], .expert = r[gate_.choice], .prob = r[gate_.prob]});
  });
}

void SharedExpert::forward_out(Run& r) const {
  down_.forward(r, activation_.output());
}

void SharedExpert::backward_out(Run& r, const Value& d_out) const {
  down_.dgrad(r, d_out);
  if (gate_) gate_backward(r);
  down_.wgrad(r);
}

void SharedExpert::gate_backward(Run& r) const {
  const Gate& g = gate_;
  const Activation& a = activation_;
  const Writes weighted = a.out ? writes(over(a.d_out, d_act_), over(g.weighted, a.out))
                                : writes(over(a.d_out, d_act_), g.weighted);
  r.dgrad("shared_weight", reads(d_act_, a.out ? a.out : a.in, g.prob, g.logit, g.choice),
          weighted.with(g.d_prob.bit() | g.d_logit.bit()), [&] {
            if (!a.out) a.compute(r, g.weighted);
            ops::gate_backward(r.exec(), {.dact = r[d_act_],
                                          .act = r[a.out ? a.out : g.weighted],
                                          .prob = r[g.prob],
                                          .dprob = r[g.d_prob],
                                          .dact_out = r[a.d_out],
                                          .act_out = r[g.weighted]});
            ops::router_backward(r.exec(), {.rule = gate_rule,
                                            .logits = r[g.logit],
                                            .expert = r[g.choice],
                                            .dprob = r[g.d_prob],
                                            .dlogits = r[g.d_logit]});
          });
}

void SharedExpert::backward_in(Run& r) const {
  activation_.backward(r);
  if (!gate_) return up_.backward(r, activation_.gradient());
  const Gate& g = gate_;
  const Slot x = up_.x();
  up_.dgrad(
      r, activation_.gradient(),
      {.reads = reads(g.d_logit), .work = [&] {
         ops::linear_backward_data(
             r.exec(),
             {.dout = r[g.d_logit], .weight = r.weight(g.parameter), .dx = r[up_.d_x()], .accumulate = true});
       }});
  up_.wgrad(r);
  if (!r.context().trains(g.parameter)) return;
  r.wgrad("shared_gate", reads(g.d_logit, x), [&] {
    ops::linear_backward_weight(r.exec(), {.dout = r[g.d_logit],
                                           .x = r[x],
                                           .dweight = r.grad(g.parameter),
                                           .accumulate = r.accumulates(g.parameter)});
    r.gradient_ready({g.parameter});
  });
}

}  // namespace nrl::model
