#include "apps/model/block.h"

#include "core/ops/kernel_table.h"

namespace nrl::model {
namespace {

using F = ForwardStep;
using B = BackwardStep;
constexpr int s(F step) {
  return static_cast<int>(step);
}
constexpr int s(B step) {
  return static_cast<int>(step);
}
constexpr int next_layer = s(F::count);  // read by the first step of the layer above

// Built once per (spec, recipe) by the caller's storage below.
std::vector<memory::SlotSpec> make_slots(const ModelSpec& m, const precision::Recipe& r) {
  const DType a = r.activations;
  const int64_t stats = m.norm == ops::NormKind::layer ? 2 : 1;
  const int64_t qk = m.qk_norm ? m.q_width() + m.kv_width() : 0;
  const int64_t qk_stats = m.qk_norm ? m.heads + m.kv_heads : 0;
  const B qkv_until = m.qk_norm ? B::rope : B::attention;
  return {
      // name, width, dtype, made, read in forward until, read in backward from .. until, recompute rule
      {"resid1", m.hidden, a, -1, s(F::norm2), s(B::qkv), s(B::norm1), ""},
      {"stats1", stats, DType::f32, s(F::norm1), s(F::norm1), s(B::norm1), s(B::norm1), ""},
      {"ln1", m.hidden, a, s(F::norm1), s(F::qkv), s(B::qkv), s(B::qkv), "norm"},
      {"qkv", m.qkv_width(), a, s(F::qkv), s(F::attention), s(B::attention), s(qkv_until), ""},
      {"qk", qk, a, s(F::rope), s(F::attention), s(B::attention), s(B::attention), ""},
      {"qk_stats", qk_stats, DType::f32, s(F::rope), s(F::rope), s(B::rope), s(B::rope), ""},
      {"attn", m.q_width(), a, s(F::attention), s(F::o_proj), s(B::o_proj), s(B::attention), ""},
      {"lse", m.heads, DType::f32, s(F::attention), s(F::attention), s(B::attention), s(B::attention), ""},
      {"resid2", m.hidden, a, s(F::o_proj), next_layer, s(B::mlp_in), s(B::norm2), ""},
      {"stats2", stats, DType::f32, s(F::norm2), s(F::norm2), s(B::norm2), s(B::norm2), ""},
      {"ln2", m.hidden, a, s(F::norm2), s(F::mlp_in), s(B::mlp_in), s(B::mlp_in), "norm"},
      {"mlp_in", m.mlp_in_width(), a, s(F::mlp_in), s(F::activation), s(B::mlp_out), s(B::mlp_in), ""},
      {"act", m.ffn, a, s(F::activation), s(F::mlp_out), s(B::mlp_out), s(B::mlp_out), "activation"},
  };
}

std::vector<memory::GradientSlotSpec> make_gradient_slots(const ModelSpec& m, const precision::Recipe& r,
                                                          bool fuse_gelu) {
  const DType a = r.activations;
  return {
      {"d_act", m.ffn, a, s(B::mlp_out), s(fuse_gelu ? B::mlp_in : B::activation)},
      {"d_ln2", m.hidden, a, s(B::mlp_in), s(B::norm2)},
      {"d_attn", m.q_width(), a, s(B::o_proj), s(B::attention)},
      {"d_qkv", m.qkv_width(), a, s(B::attention), s(B::qkv)},
      {"d_ln1", m.hidden, a, s(B::qkv), s(B::norm1)},
  };
}

// mean and rstd of a stats slot: planar, mean only for LayerNorm.
struct Stats {
  Tensor mean, rstd;
};
Stats split_stats(const Tensor& t, ops::NormKind kind) {
  const int64_t n = t.dim(0);
  float* p = t.ptr<float>();
  if (kind == ops::NormKind::rms) return {{}, make_tensor(p, DType::f32, {n})};
  return {make_tensor(p, DType::f32, {n}), make_tensor(p + n, DType::f32, {n})};
}

Tensor flat(const Tensor& t) {
  return make_tensor(t.data, t.dtype, {t.numel()});
}

// The mask's name within a step.
uint64_t dropout_stream(int layer, DropoutSite site) {
  return (static_cast<uint64_t>(layer + 1) << 4) | static_cast<uint64_t>(site);
}

}  // namespace

ops::FusedDropout fused_dropout(const ModelSpec& spec, uint64_t seed, int layer, DropoutSite site,
                                const MicroBatch& mb) {
  const float p = site == DropoutSite::probabilities ? spec.attention_dropout : spec.residual_dropout;
  return {mb.dropout ? p : 0.0f, seed, dropout_stream(layer, site), mb.first_row, mb.step};
}

std::vector<memory::SlotSpec> block_slots(const ModelSpec& spec, const precision::Recipe& recipe) {
  return make_slots(spec, recipe);
}
std::vector<memory::GradientSlotSpec> block_gradient_slots(const ModelSpec& spec,
                                                           const precision::Recipe& recipe, bool fuse_gelu) {
  return make_gradient_slots(spec, recipe, fuse_gelu);
}

Tensor Block::weight(int parameter) const {
  return parameter < 0 ? Tensor{} : c_.parameters[static_cast<size_t>(parameter)].weight;
}
Tensor Block::grad(int parameter) const {
  return parameter < 0 ? Tensor{} : c_.parameters[static_cast<size_t>(parameter)].grad;
}

void Block::drop(const Tensor& x, const Tensor& out, DropoutSite site, const MicroBatch& mb) const {
  ops::dropout(*c_.exec, {x, out, c_.spec->residual_dropout, c_.seed, dropout_stream(layer_, site),
                          mb.first_row, mb.step});
}

void Block::produce(Slot slot, Phase phase, const MicroBatch& mb, const Tensor& residual) {
  ops::Exec& e = *c_.exec;
  const ModelSpec& m = *c_.spec;
  // What a slot is made from is, in either phase, where that phase finds it.
  auto& t = phase == Phase::forward ? t_.forward : t_.backward;
  auto at = [&](Slot which) -> const Tensor& { return t[static_cast<size_t>(which)]; };
  // The residual sum is made in the forward pass only; a recomputed norm starts from the sum.
  auto norm = [&](Slot x, Slot stats, Slot out, int w, int b, const Tensor& add, int layer,
                  DropoutSite site) {
    const Stats st = split_stats(at(stats), m.norm);
    ops::NormForward a{m.norm, m.norm_eps, at(x), {}, {}, weight(w), weight(b), at(out), {}, {}};
    if (phase == Phase::forward) {
      a.mean = st.mean, a.rstd = st.rstd;
      if (add) {
        a.residual = add, a.sum = at(x);
        a.dropout = fused_dropout(m, c_.seed, layer, site, mb);
      }
    }
    ops::norm_forward(e, a);
  };
  switch (slot) {
    case Slot::ln1:
      norm(Slot::resid1, Slot::stats1, Slot::ln1, p_.norm1, p_.norm1_bias, residual, layer_ - 1,
           DropoutSite::mlp);
      break;
    case Slot::ln2:
      norm(Slot::resid2, Slot::stats2, Slot::ln2, p_.norm2, p_.norm2_bias, residual, layer_,
           DropoutSite::attention);
      break;
    case Slot::qkv:
      ops::linear_forward(e, {at(Slot::ln1), weight(p_.qkv), weight(p_.qkv_bias), at(Slot::qkv)});
      break;
    case Slot::qk: {  // with QK-norm into its own slot, else RoPE works on qkv itself
      if (!m.qk_norm && !m.use_rope) break;
      const Tensor raw = m.heads_of(at(Slot::qkv), 0, m.heads + m.kv_heads);
      ops::QkNormRopeForward a{.x = raw, .out = raw, .heads = m.heads};
      if (m.qk_norm) {
        a.out = m.heads_of(at(Slot::qk), 0, m.heads + m.kv_heads);
        a.q_weight = weight(p_.q_norm), a.k_weight = weight(p_.k_norm);
        a.eps = m.norm_eps;
        a.rstd = flat(at(Slot::qk_stats));
      }
      if (m.use_rope) a.table = c_.rope_table, a.positions = mb.positions;
      ops::qk_norm_rope_forward(e, a);
      break;
    }
    case Slot::attn: {
      const Tensor qk = m.qk_norm ? at(Slot::qk) : at(Slot::qkv);
      ops::AttentionForward a;
      a.q = m.heads_of(qk, 0, m.heads);
      a.k = m.heads_of(qk, m.q_width(), m.kv_heads);
      a.v = m.heads_of(at(Slot::qkv), m.q_width() + m.kv_width(), m.kv_heads);
      a.out = at(Slot::attn).split_heads(m.heads, m.head_dim);
      a.lse = at(Slot::lse);
      a.cu_q = a.cu_k = mb.cu_seqlens;
      a.scale = m.attention_scale();
      a.window = m.window;
      a.lengths = mb.lengths;
      a.dropout = fused_dropout(m, c_.seed, layer_, DropoutSite::probabilities, mb);
      ops::attention_forward(e, a);
      break;
    }
    case Slot::resid2:  // the projection; dropout and the sum with resid1 are fused into norm2
      ops::linear_forward(e, {at(Slot::attn), weight(p_.o), weight(p_.o_bias), at(Slot::resid2)});
      break;
    case Slot::mlp_in:
      if (c_.fuse_gelu)
        ops::linear_forward(e, {.x = at(Slot::ln2),
                                .weight = weight(p_.mlp_in),
                                .bias = weight(p_.mlp_in_bias),
                                .out = at(Slot::act),
                                .activation = m.activation,
                                .pre_activation = at(Slot::mlp_in)});
      else
        ops::linear_forward(e, {at(Slot::ln2), weight(p_.mlp_in), weight(p_.mlp_in_bias), at(Slot::mlp_in)});
      break;
    case Slot::act:
      if (!c_.fuse_gelu) ops::activation_forward(e, {m.activation, m.gated, at(Slot::mlp_in), at(Slot::act)});
      break;
    default:
      NRL_CHECK(false, "slot {} is written together with another one", static_cast<int>(slot));
  }
}

void Block::forward(const MicroBatch& mb, const Tensor& previous_resid2, const Tensor& next) {
  const auto make = [&](ForwardStep step, Slot slot, const Tensor& residual = {}) {
    c_.enter(c_.ticks.forward(layer_, s(step)));
    produce(slot, Phase::forward, mb, residual);
  };
  make(F::norm1, Slot::ln1, previous_resid2);
  make(F::qkv, Slot::qkv);
  make(F::rope, Slot::qk);
  make(F::attention, Slot::attn);
  make(F::o_proj, Slot::resid2);
  make(F::norm2, Slot::ln2, resid1());
  make(F::mlp_in, Slot::mlp_in);
  make(F::activation, Slot::act);
  c_.enter(c_.ticks.forward(layer_, s(F::mlp_out)));
  const Tensor& act = t_.forward[static_cast<size_t>(Slot::act)];
  ops::linear_forward(*c_.exec, {act, weight(p_.mlp_out), weight(p_.mlp_out_bias), next});
}

Tensor Block::for_backward(Slot slot, const MicroBatch& mb) {
  if (t_.keep[static_cast<size_t>(slot)] == memory::Keep::recompute) produce(slot, Phase::recompute, mb, {});
  return in(slot);
}

void Block::linear_weight_gradient(const Tensor& dout, const Tensor& x, int w, int b) {
  ops::linear_backward_weight(*c_.exec, {dout, x, grad(w), grad(b), true});
  c_.gradient_ready(w);
  if (b >= 0) c_.gradient_ready(b);
}

void Block::backward_norm(const Tensor& dout, const Tensor& x, const Tensor& stats, int w, int b,
                          const Tensor& dresid) {
  const Stats st = split_stats(stats, c_.spec->norm);
  ops::norm_backward(*c_.exec,
                     {c_.spec->norm, dout, x, weight(w), st.mean, st.rstd, dresid, dresid, grad(w), grad(b)});
  c_.gradient_ready(w);
  if (b >= 0) c_.gradient_ready(b);
}

void Block::backward_data(BackwardStep step, const MicroBatch& mb, const Tensor& dresid,
                          const Tensor& dropped) {
  ops::Exec& e = *c_.exec;
  const ModelSpec& m = *c_.spec;
  switch (step) {
    case B::mlp_out:
      if (m.residual_dropout > 0) drop(dresid, dropped, DropoutSite::mlp, mb);
      ops::linear_backward_data(e, {.dout = projected(dresid, dropped),
                                    .weight = weight(p_.mlp_out),
                                    .dx = d(GradSlot::d_act),
                                    .activation = c_.fuse_gelu ? m.activation : ops::Activation::none,
                                    .pre_activation = c_.fuse_gelu ? in(Slot::mlp_in) : Tensor{}});
      break;
    case B::activation:
      if (!c_.fuse_gelu)
        ops::activation_backward(e,
                                 {m.activation, m.gated, d(GradSlot::d_act), in(Slot::mlp_in), d_mlp_in()});
      break;
    case B::mlp_in:
      ops::linear_backward_data(e, {d_mlp_in(), weight(p_.mlp_in), d(GradSlot::d_ln2), false});
      break;
    case B::norm2:
      backward_norm(d(GradSlot::d_ln2), in(Slot::resid2), in(Slot::stats2), p_.norm2, p_.norm2_bias, dresid);
      break;
    case B::o_proj:
      if (m.residual_dropout > 0) drop(dresid, dropped, DropoutSite::attention, mb);
      ops::linear_backward_data(e, {projected(dresid, dropped), weight(p_.o), d(GradSlot::d_attn), false});
      break;
    case B::attention: {
      const Tensor qk = m.qk_norm ? in(Slot::qk) : in(Slot::qkv);
      const Tensor dqkv = d(GradSlot::d_qkv);
      ops::AttentionBackward a;
      a.dout = d(GradSlot::d_attn).split_heads(m.heads, m.head_dim);
      a.q = m.heads_of(qk, 0, m.heads);
      a.k = m.heads_of(qk, m.q_width(), m.kv_heads);
      a.v = m.heads_of(in(Slot::qkv), m.q_width() + m.kv_width(), m.kv_heads);
      a.out = in(Slot::attn).split_heads(m.heads, m.head_dim);
      a.lse = in(Slot::lse);
      a.cu_q = a.cu_k = mb.cu_seqlens;
      a.dq = m.heads_of(dqkv, 0, m.heads);
      a.dk = m.heads_of(dqkv, m.q_width(), m.kv_heads);
      a.dv = m.heads_of(dqkv, m.q_width() + m.kv_width(), m.kv_heads);
      a.scale = m.attention_scale();
      a.window = m.window;
      a.lengths = mb.lengths;
      a.dropout = fused_dropout(m, c_.seed, layer_, DropoutSite::probabilities, mb);
      ops::attention_backward(e, a);
      break;
    }
    case B::rope: {
      if (!m.qk_norm && !m.use_rope) break;
      const Tensor dqk = m.heads_of(d(GradSlot::d_qkv), 0, m.heads + m.kv_heads);
      ops::QkNormRopeBackward a{.dout = dqk, .dx = dqk, .heads = m.heads};
      if (m.qk_norm) {
        a.x = m.heads_of(in(Slot::qkv), 0, m.heads + m.kv_heads);
        a.q_weight = weight(p_.q_norm), a.k_weight = weight(p_.k_norm);
        a.rstd = flat(in(Slot::qk_stats));
        a.dq_weight = grad(p_.q_norm), a.dk_weight = grad(p_.k_norm);
      }
      if (m.use_rope) a.table = c_.rope_table, a.positions = mb.positions;
      ops::qk_norm_rope_backward(e, a);
      if (m.qk_norm) {
        c_.gradient_ready(p_.k_norm);
        c_.gradient_ready(p_.q_norm);
      }
      break;
    }
    case B::qkv:
      ops::linear_backward_data(e, {d(GradSlot::d_qkv), weight(p_.qkv), d(GradSlot::d_ln1), false});
      break;
    case B::norm1:
      backward_norm(d(GradSlot::d_ln1), in(Slot::resid1), in(Slot::stats1), p_.norm1, p_.norm1_bias, dresid);
      break;
    case B::count:
      break;
  }
}

void Block::backward_weight(BackwardStep step, const MicroBatch& mb, const Tensor& dresid,
                            const Tensor& dropped) {
  switch (step) {
    case B::mlp_out:
      linear_weight_gradient(projected(dresid, dropped), for_backward(Slot::act, mb), p_.mlp_out,
                             p_.mlp_out_bias);
      break;
    case B::mlp_in:
      linear_weight_gradient(d_mlp_in(), for_backward(Slot::ln2, mb), p_.mlp_in, p_.mlp_in_bias);
      break;
    case B::o_proj:
      linear_weight_gradient(projected(dresid, dropped), in(Slot::attn), p_.o, p_.o_bias);
      break;
    case B::qkv:
      linear_weight_gradient(d(GradSlot::d_qkv), for_backward(Slot::ln1, mb), p_.qkv, p_.qkv_bias);
      break;
    default:  // norms add to their small weight gradients together with the data gradient
      break;
  }
}

void Block::backward(const MicroBatch& mb, const Tensor& dresid, const Tensor& dropped) {
  for (int i = 0; i < static_cast<int>(B::count); ++i) {
    const auto step = static_cast<BackwardStep>(i);
    c_.enter(c_.ticks.backward(layer_, i));
    backward_data(step, mb, dresid, dropped);
    backward_weight(step, mb, dresid, dropped);
  }
}

}  // namespace nrl::model
