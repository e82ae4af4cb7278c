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

std::vector<memory::GradientSlotSpec> make_gradient_slots(const ModelSpec& m, const precision::Recipe& r) {
  const DType a = r.activations;
  return {
      {"d_act", m.ffn, a, s(B::mlp_out), s(B::activation)},
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

enum Site { attention_site, mlp_site };

}  // namespace

std::vector<memory::SlotSpec> block_slots(const ModelSpec& spec, const precision::Recipe& recipe) {
  return make_slots(spec, recipe);
}
std::vector<memory::GradientSlotSpec> block_gradient_slots(const ModelSpec& spec,
                                                           const precision::Recipe& recipe) {
  return make_gradient_slots(spec, recipe);
}

Tensor Block::weight(int parameter) const {
  return parameter < 0 ? Tensor{} : c_.parameters[static_cast<size_t>(parameter)].weight;
}
Tensor Block::grad(int parameter) const {
  return parameter < 0 ? Tensor{} : c_.parameters[static_cast<size_t>(parameter)].grad;
}

void Block::drop(const Tensor& x, const Tensor& out, int site, const MicroBatch& mb) const {
  const auto stream = (static_cast<uint64_t>(mb.step) << 24) | (static_cast<uint64_t>(layer_ + 1) << 4) |
                      static_cast<uint64_t>(site);
  ops::dropout(*c_.exec, {x, out, c_.spec->residual_dropout, c_.seed, stream, mb.first_row});
}

void Block::produce(Slot slot, Phase phase, const MicroBatch& mb, const Tensor& residual) {
  ops::Exec& e = *c_.exec;
  const ModelSpec& m = *c_.spec;
  // What a slot is made from is, in either phase, where that phase finds it.
  auto& t = phase == Phase::forward ? t_.forward : t_.backward;
  auto at = [&](Slot which) -> const Tensor& { return t[static_cast<size_t>(which)]; };
  // The residual sum is made in the forward pass only; a recomputed norm starts from the sum.
  auto norm = [&](Slot x, Slot stats, Slot out, int w, int b, const Tensor& add) {
    const Stats st = split_stats(at(stats), m.norm);
    ops::NormForward a{m.norm, m.norm_eps, at(x), {}, {}, weight(w), weight(b), at(out), {}, {}};
    if (phase == Phase::forward) {
      a.mean = st.mean, a.rstd = st.rstd;
      if (add) a.residual = add, a.sum = at(x);
    }
    ops::norm_forward(e, a);
  };
  switch (slot) {
    case Slot::ln1:
      norm(Slot::resid1, Slot::stats1, Slot::ln1, p_.norm1, p_.norm1_bias, residual);
      break;
    case Slot::ln2:
      norm(Slot::resid2, Slot::stats2, Slot::ln2, p_.norm2, p_.norm2_bias, residual);
      break;
    case Slot::qkv:
      ops::linear_forward(e, {at(Slot::ln1), weight(p_.qkv), weight(p_.qkv_bias), at(Slot::qkv)});
      break;
    case Slot::qk: {  // QK-norm into its own slot, then RoPE in place; without QK-norm RoPE works on qkv
                      // itself
      const Tensor raw = at(Slot::qkv);
      const Tensor dst = m.qk_norm ? at(Slot::qk) : raw;
      if (m.qk_norm) {
        float* stats = at(Slot::qk_stats).ptr<float>();
        const int64_t n = raw.dim(0);
        ops::norm_forward(e, {ops::NormKind::rms,
                              m.norm_eps,
                              m.heads_of(raw, 0, m.heads),
                              {},
                              {},
                              weight(p_.q_norm),
                              {},
                              m.heads_of(dst, 0, m.heads),
                              {},
                              make_tensor(stats, DType::f32, {n * m.heads})});
        ops::norm_forward(e, {ops::NormKind::rms,
                              m.norm_eps,
                              m.heads_of(raw, m.q_width(), m.kv_heads),
                              {},
                              {},
                              weight(p_.k_norm),
                              {},
                              m.heads_of(dst, m.q_width(), m.kv_heads),
                              {},
                              make_tensor(stats + n * m.heads, DType::f32, {n * m.kv_heads})});
      }
      if (m.use_rope)
        ops::rope(e, {m.heads_of(dst, 0, m.heads + m.kv_heads), c_.rope_table, mb.positions, false});
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
      ops::attention_forward(e, a);
      break;
    }
    case Slot::resid2:  // the projection; the sum with resid1 is fused into norm2
      ops::linear_forward(e, {at(Slot::attn), weight(p_.o), weight(p_.o_bias), at(Slot::resid2)});
      if (m.residual_dropout > 0) drop(at(Slot::resid2), at(Slot::resid2), attention_site, mb);
      break;
    case Slot::mlp_in:
      ops::linear_forward(e, {at(Slot::ln2), weight(p_.mlp_in), weight(p_.mlp_in_bias), at(Slot::mlp_in)});
      break;
    case Slot::act:
      ops::activation_forward(e, {m.activation, m.gated, at(Slot::mlp_in), at(Slot::act)});
      break;
    default:
      NRL_CHECK(false, "slot {} is written together with another one", static_cast<int>(slot));
  }
}

void Block::forward(const MicroBatch& mb, const Tensor& previous_resid2, const Tensor& next) {
  using P = Phase;
  const ModelSpec& m = *c_.spec;
  produce(Slot::ln1, P::forward, mb, previous_resid2);
  produce(Slot::qkv, P::forward, mb, {});
  produce(Slot::qk, P::forward, mb, {});
  produce(Slot::attn, P::forward, mb, {});
  produce(Slot::resid2, P::forward, mb, {});
  produce(Slot::ln2, P::forward, mb, resid1());
  produce(Slot::mlp_in, P::forward, mb, {});
  produce(Slot::act, P::forward, mb, {});
  const Tensor& act = t_.forward[static_cast<size_t>(Slot::act)];
  ops::linear_forward(*c_.exec, {act, weight(p_.mlp_out), weight(p_.mlp_out_bias), next});
  if (m.residual_dropout > 0) drop(next, next, mlp_site, mb);
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
      if (m.residual_dropout > 0) drop(dresid, dropped, mlp_site, mb);
      ops::linear_backward_data(e,
                                {projected(dresid, dropped), weight(p_.mlp_out), d(GradSlot::d_act), false});
      break;
    case B::activation:  // the gradient takes the place of mlp_in, which is dead from here on
      ops::activation_backward(
          e, {m.activation, m.gated, d(GradSlot::d_act), in(Slot::mlp_in), in(Slot::mlp_in)});
      break;
    case B::mlp_in:
      ops::linear_backward_data(e, {in(Slot::mlp_in), weight(p_.mlp_in), d(GradSlot::d_ln2), false});
      break;
    case B::norm2:
      backward_norm(d(GradSlot::d_ln2), in(Slot::resid2), in(Slot::stats2), p_.norm2, p_.norm2_bias, dresid);
      break;
    case B::o_proj:
      if (m.residual_dropout > 0) drop(dresid, dropped, attention_site, mb);
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
      ops::attention_backward(e, a);
      break;
    }
    case B::rope: {
      const Tensor dqkv = d(GradSlot::d_qkv);
      if (m.use_rope)
        ops::rope(e, {m.heads_of(dqkv, 0, m.heads + m.kv_heads), c_.rope_table, mb.positions, true});
      if (m.qk_norm) {
        float* stats = in(Slot::qk_stats).ptr<float>();
        const int64_t n = dqkv.dim(0);
        auto back = [&](int64_t first, int64_t heads, int w, float* rstd) {
          const Tensor dx = m.heads_of(dqkv, first, heads);
          ops::norm_backward(e, {ops::NormKind::rms,
                                 dx,
                                 m.heads_of(in(Slot::qkv), first, heads),
                                 weight(w),
                                 {},
                                 make_tensor(rstd, DType::f32, {n * heads}),
                                 {},
                                 dx,
                                 grad(w),
                                 {}});
          c_.gradient_ready(w);
        };
        back(m.q_width(), m.kv_heads, p_.k_norm, stats + n * m.heads);
        back(0, m.heads, p_.q_norm, stats);
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
      linear_weight_gradient(in(Slot::mlp_in), for_backward(Slot::ln2, mb), p_.mlp_in, p_.mlp_in_bias);
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
    backward_data(step, mb, dresid, dropped);
    backward_weight(step, mb, dresid, dropped);
  }
}

}  // namespace nrl::model
