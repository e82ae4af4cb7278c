#include "apps/model/layers/sublayers.h"
#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::model {

using memory::evaluation;
using memory::generation;
using memory::recompute;
using memory::training;
using precision::Gemm;

namespace {

Tensor flat(const Tensor& t) {
  return make_tensor(t.data, t.dtype, {t.numel()});
}

}  // namespace

Attention::Attention(const ModelSpec& m, const ModelLayout& layout, const precision::Recipe& recipe,
                     const AddSlot& add, int layer, const LayerParameters& p, Stream in, Slot d_out,
                     StreamGradient d_x, std::optional<ContextParallel> context)
    : spec_(m),
      p_(p),
      layer_(layer),
      norm_(m, recipe, add, in, p.norm1, p.norm1_bias, stores_norm(m, layout, recipe, layer, Gemm::qkv)),
      d_out_(d_out),
      d_x_(d_x),
      qkv_proj_(recipe, add,
                {.layer = layer,
                 .gemm = Gemm::qkv,
                 .weight = p.qkv,
                 .bias = p.qkv_bias,
                 .in = m.hidden,
                 .out = m.qkv_width(),
                 .column = true,
                 .gathers = gathers_fp8(m, layout, recipe, layer, Gemm::qkv),
                 .rules = layout.sequence_parallel ? gather_rule : "norm"}),
      o_proj_(recipe, add,
              {.layer = layer,
               .gemm = Gemm::o_proj,
               .weight = p.o,
               .bias = p.o_bias,
               .in = m.q_width(),
               .out = m.hidden,
               .gathers = gathers_fp8(m, layout, recipe, layer, Gemm::o_proj),
               .rules = "core_attn"}),
      context_(std::move(context)) {
  const DType dtype = recipe.activations();
  qkv_ = add({.name = "qkv", .width = m.qkv_width(), .dtype = dtype, .rules = "qkv"});
  if (m.qk_norm) {
    qk_ = add({.name = "qk", .width = m.q_width() + m.kv_width(), .dtype = dtype, .rules = "qkv"});
    qk_stats_ = add({.name = "qk statistics", .width = m.heads + m.kv_heads, .rules = "qkv"});
  } else if (m.use_rope) {
    qk_ = add({.name = "rotated qkv", .width = m.qkv_width(), .dtype = dtype, .rules = "qkv"});
  }
  keys_ = qk_ ? qk_ : qkv_;
  values_ = m.qk_norm ? qkv_ : keys_;
  NRL_CHECK(!context_ || !recipe.quantizes_attention(layer), "FP8 attention with context parallelism");
  const auto operand = [&](Gemm gemm, precision::Role role, int64_t width) {
    return QuantizedOperand(recipe, add,
                            {.layer = layer,
                             .gemm = gemm,
                             .role = role,
                             .width = width,
                             .divided = true,
                             .row_rules = role == precision::Role::input ? "qkv" : "",
                             .column = false,
                             .generation = false});
  };
  q_ = operand(Gemm::attention_q, precision::Role::input, m.q_width());
  k_ = operand(Gemm::attention_k, precision::Role::input, m.kv_width());
  v_ = operand(Gemm::attention_v, precision::Role::input, m.kv_width());
  d_out_heads_ = operand(Gemm::attention_out, precision::Role::gradient, m.q_width());
  attn_ = add({.name = "attention", .width = m.q_width(), .dtype = dtype, .rules = "core_attn"});
  if (context_) {
    const parallel::ContextAttention& a = context_->attention();
    lse_ = add({.name = "exchanged for attention",
                .width = a.saved_width(),
                .dtype = DType::u8,
                .rules = "core_attn"});
    exchange_ = add({.name = "attention exchange", .width = a.forward_width(), .dtype = DType::u8});
    d_exchange_ = add({.name = "d_attention exchange", .width = a.backward_width(), .dtype = DType::u8});
  } else {
    lse_ = add({.name = "lse", .width = m.heads, .rules = "core_attn"});
  }
  out_ = add({.name = "projection", .width = m.hidden, .dtype = dtype, .rows = sequence_rows});
  const DType gradients = recipe.gradients();
  if (m.residual_dropout > 0)
    d_proj_ = add({.name = "d_projection", .width = m.hidden, .dtype = gradients, .rows = sequence_rows});
  d_attn_ = add({.name = "d_attention", .width = m.q_width(), .dtype = gradients});
  d_qkv_ = add({.name = "d_qkv", .width = m.qkv_width(), .dtype = gradients});
  d_norm_ = add({.name = "d_norm1", .width = m.hidden, .dtype = gradients, .rows = sequence_rows});
  input_.emplace(layout, layout.overlap, add, norm_.out, d_norm_, m.hidden, dtype, gradients,
                 qkv_proj_.gathers());
  output_.emplace(layout, layout.overlap, add, out_, d_proj_ ? d_proj_ : d_out_, m.hidden, dtype, gradients,
                  o_proj_.gathers());
  if (measures_rotated()) d_qkv_amax_ = add({.name = "d_qkv amax", .width = 1, .rows = one_row});
  d_out_amax_ = largest_gradient(add, o_proj_, *output_, d_out_, false);
}

void Attention::forward(Run& r) {
  norm_.forward(r, qkv_proj_.input_amax());
  input_->gather(r);
  qkv_proj_.quantize_input(r, source_of(norm_, input_->x));
  r.step("qkv", qkv_proj_.input_reads(input_->x), writes(qkv_), [&] {
    input_->multiply(r, qkv_proj_.input(r, input_->x), [&](const GemmRows& rows) {
      ops::linear_forward(r.exec(), {.x = rows.input(qkv_proj_.input(r, input_->x)),
                                     .weight = qkv_proj_.weight(r),
                                     .bias = r.weight(p_.qkv_bias),
                                     .out = rows.output(r[qkv_])});
    });
  });
  if (spec_.qk_norm)
    r.step("qk_norm_rope", reads(qkv_), writes(qk_, qk_stats_), [&] { rotate(r); });
  else if (spec_.use_rope)
    r.step("rope", reads(qkv_), writes(over(qk_, qkv_)), [&] { rotate(r); });
  quantize_operands(r);
  r.step(training | evaluation | recompute, "attention", operand_reads(), writes(attn_, lse_, exchange_),
         [&] { context_ ? attend_across_ranks(r) : attend(r); });
  r.step(generation, "cached_attention", reads(keys_, values_), writes(attn_), [&] { attend_to_cache(r); });
  o_proj_.quantize_input(r, {attn_});
  r.step("o_proj", o_proj_.input_reads(attn_), writes(output_->partial, out_), [&] {
    output_->multiply(r, [&](const GemmRows& rows) {
      ops::linear_forward(r.exec(), {.x = rows.input(o_proj_.input(r, attn_)),
                                     .weight = o_proj_.weight(r),
                                     .bias = RowOutput::bias(r, p_.o_bias),
                                     .out = rows.output(r[output_->partial])});
    });
  });
}

void Attention::backward(Run& r) {
  const Slot d_proj = output_->d_full;
  if (d_proj_)
    r.dgrad("projection_dropout", reads(d_out_), writes(d_proj_), [&] {
      r.drop(r[d_out_], {}, r[d_proj_], spec_.residual_dropout, layer_, DropoutSite::attention);
    });
  output_->gather(r);
  o_proj_.quantize_gradient(r, {.slot = d_proj, .amax = d_out_amax_});
  r.dgrad("o_proj", o_proj_.gradient_reads(d_proj), writes(d_attn_), [&] {
    output_->multiply_gradient(r, o_proj_.gradient(r, d_proj), [&](const GemmRows& rows) {
      ops::linear_backward_data(r.exec(), {.dout = rows.input(o_proj_.gradient(r, d_proj)),
                                           .weight = o_proj_.weight_for_gradient(r),
                                           .dx = rows.output(r[d_attn_])});
    });
  });
  o_proj_.wgrad(r, "o_proj", d_proj, attn_);
  if (context_)
    r.dgrad("attention",
            context_->attention().saves_inputs() ? reads(d_attn_, lse_)
                                                 : reads(d_attn_, keys_, values_, attn_, lse_),
            writes(d_qkv_, d_exchange_), [&] { attend_across_ranks_backward(r); });
  else
    dgrad(r);
  if (spec_.qk_norm)
    r.dgrad("qk_norm_rope", reads(d_qkv_, qkv_, qk_stats_), writes(d_qkv_), [&] { rotate_backward(r); });
  else if (spec_.use_rope)
    r.dgrad("rope", reads(d_qkv_), writes(d_qkv_, d_qkv_amax_), [&] { rotate_backward(r); });
  input_->gather_again(r);
  qkv_proj_.quantize_gradient(r, {.slot = d_qkv_, .amax = d_qkv_amax_});
  r.dgrad("qkv", qkv_proj_.gradient_reads(d_qkv_), writes(input_->d_x, d_norm_), [&] {
    ops::linear_backward_data(r.exec(), {.dout = qkv_proj_.gradient(r, d_qkv_),
                                         .weight = qkv_proj_.weight_for_gradient(r),
                                         .dx = r[input_->d_x]});
    input_->reduce(r);
  });
  qkv_proj_.wgrad(r, "qkv", d_qkv_, input_->x, [&] { input_->wait(r); });
  input_->finish_reduce(r);
  norm_.backward(r, d_norm_, d_out_, d_x_);
}

void Attention::rotate(Run& r) const {
  const ModelSpec& m = spec_;
  const int64_t heads = m.heads + m.kv_heads;
  const Tensor qkv = r[qkv_], qk = r[qk_];
  ops::QkNormRopeForward a{.x = m.heads_of(qkv, 0, heads), .out = m.heads_of(qk, 0, heads), .heads = m.heads};
  if (m.qk_norm) {
    a.q_weight = r.weight(p_.q_norm), a.k_weight = r.weight(p_.k_norm);
    a.eps = m.norm_eps;
    a.rstd = flat(r[qk_stats_]);
  } else {
    if (qk.data != qkv.data) ops::copy(r.exec(), qkv, qk);
    a.x = a.out;
  }
  if (m.use_rope) a.table = r.context().rope_table, a.positions = r.batch().positions;
  ops::qk_norm_rope_forward(r.exec(), a);
}

bool Attention::measures_rotated() const {
  return qkv_proj_.gradient_amax() && spec_.use_rope && !spec_.qk_norm &&
         spec_.rope.rotary_dim == spec_.head_dim && spec_.kv_width() % 16 == 0;
}

void Attention::rotate_backward(Run& r) const {
  const ModelSpec& m = spec_;
  const int64_t heads = m.heads + m.kv_heads;
  const Tensor amax = zero_amax(r, d_qkv_amax_);
  const Tensor d_v = r[d_qkv_].columns(m.q_width() + m.kv_width(), m.kv_width());
  if (amax) ops::largest_magnitude(r.exec(), {.source = {d_v}, .amax = amax});
  const Tensor d_qk = m.heads_of(r[d_qkv_], 0, heads);
  ops::QkNormRopeBackward a{.dout = d_qk, .dx = d_qk, .heads = m.heads};
  if (m.qk_norm) {
    a.x = m.heads_of(r[qkv_], 0, heads);
    a.q_weight = r.weight(p_.q_norm), a.k_weight = r.weight(p_.k_norm);
    a.rstd = flat(r[qk_stats_]);
    a.dq_weight = r.grad(p_.q_norm), a.dk_weight = r.grad(p_.k_norm);
  }
  if (m.use_rope) a.table = r.context().rope_table, a.positions = r.batch().positions;
  a.amax = amax;
  ops::qk_norm_rope_backward(r.exec(), a);
  r.gradient_ready({p_.k_norm, p_.q_norm});
}

Attention::Heads Attention::heads(const Run& r) const {
  const ModelSpec& m = spec_;
  const Tensor qk = r[keys_];
  return {.q = m.heads_of(qk, 0, m.heads),
          .k = m.heads_of(qk, m.q_width(), m.kv_heads),
          .v = m.heads_of(r[values_], m.q_width() + m.kv_width(), m.kv_heads)};
}

void Attention::dgrad(Run& r) {
  if (d_out_heads_) d_out_heads_.backward_step(r, {.slot = d_attn_});
  const Reads d_out = d_out_heads_ ? d_out_heads_.row_reads() : reads(d_attn_);
  r.dgrad("attention", d_out | operand_reads() | reads(attn_, lse_), writes(d_qkv_),
          [&] { attend_backward(r); });
}

void Attention::quantize_operands(Run& r) {
  if (!q_) return;
  const int64_t q = spec_.q_width(), kv = spec_.kv_width();
  q_.forward_steps(r, {.slot = keys_, .column = 0, .columns = q});
  k_.forward_steps(r, {.slot = keys_, .column = q, .columns = kv});
  v_.forward_steps(r, {.slot = values_, .column = q + kv, .columns = kv});
}

Attention::Heads Attention::operands(const Run& r) const {
  if (!q_) return heads(r);
  const ModelSpec& m = spec_;
  return {.q = q_.row(r).split_heads(m.heads, m.head_dim),
          .k = k_.row(r).split_heads(m.kv_heads, m.head_dim),
          .v = v_.row(r).split_heads(m.kv_heads, m.head_dim)};
}

Reads Attention::operand_reads() const {
  return q_ ? q_.row_reads() | k_.row_reads() | v_.row_reads() : reads(keys_, values_);
}

ops::HeadSlice Attention::slice(const Run& r) const {
  const ModelLayout& layout = r.layout();
  return {.first = layout.tensor_rank * spec_.heads, .all = layout.tensor * spec_.heads};
}

Tensor Attention::lse(const Run& r) const {
  const Tensor t = r[lse_];
  return make_tensor(t.data, t.dtype, {t.dim(1), t.dim(0)});
}

void Attention::attend(Run& r) const {
  const Heads h = operands(r);
  const MicroBatch& mb = r.batch();
  ops::attention_forward(r.exec(),
                         {.q = h.q,
                          .k = h.k,
                          .v = h.v,
                          .out = r[attn_].split_heads(spec_.heads, spec_.head_dim),
                          .lse = lse(r),
                          .cu_q = mb.cu_seqlens,
                          .cu_k = mb.cu_seqlens,
                          .scale = spec_.attention_scale(),
                          .window = spec_.window,
                          .lengths = mb.lengths,
                          .dropout = r.dropout(spec_.attention_dropout, layer_, DropoutSite::probabilities),
                          .slice = slice(r)});
}

void Attention::attend_to_cache(Run& r) const {
  const ModelSpec& m = spec_;
  const KeyValueCache& cache = *r.batch().cache;
  const KeyValueCache::Layer& kept = cache.layers[static_cast<size_t>(layer_)];
  const int64_t tokens = r[attn_].dim(0), length = cache.length + tokens;
  ops::copy(r.exec(), r[keys_].columns(m.q_width(), m.kv_width()), kept.keys.rows(cache.length, tokens));
  ops::copy(r.exec(), r[values_].columns(m.q_width() + m.kv_width(), m.kv_width()),
            kept.values.rows(cache.length, tokens));
  ops::attention_forward(r.exec(), {.q = heads(r).q,
                                    .k = kept.keys.rows(0, length).split_heads(m.kv_heads, m.head_dim),
                                    .v = kept.values.rows(0, length).split_heads(m.kv_heads, m.head_dim),
                                    .out = r[attn_].split_heads(m.heads, m.head_dim),
                                    .cu_q = r.batch().cu_seqlens,
                                    .cu_k = cache.cu_keys,
                                    .scale = m.attention_scale(),
                                    .window = m.window,
                                    .lengths = r.batch().lengths});
}

void Attention::attend_backward(Run& r) const {
  const ModelSpec& m = spec_;
  const Heads h = operands(r);
  const MicroBatch& mb = r.batch();
  const Tensor d_qkv = r[d_qkv_];
  const Tensor d_out = d_out_heads_ ? d_out_heads_.row(r) : r[d_attn_];
  ops::attention_backward(r.exec(),
                          {.dout = d_out.split_heads(m.heads, m.head_dim),
                           .q = h.q,
                           .k = h.k,
                           .v = h.v,
                           .out = r[attn_].split_heads(m.heads, m.head_dim),
                           .lse = lse(r),
                           .cu_q = mb.cu_seqlens,
                           .cu_k = mb.cu_seqlens,
                           .dq = m.heads_of(d_qkv, 0, m.heads),
                           .dk = m.heads_of(d_qkv, m.q_width(), m.kv_heads),
                           .dv = m.heads_of(d_qkv, m.q_width() + m.kv_width(), m.kv_heads),
                           .scale = m.attention_scale(),
                           .window = m.window,
                           .lengths = mb.lengths,
                           .dropout = r.dropout(m.attention_dropout, layer_, DropoutSite::probabilities),
                           .slice = slice(r)});
}

void Attention::attend_across_ranks(Run& r) const {
  const Heads h = heads(r);
  context_->attention().forward(
      r.exec(), context_->groups(r),
      {.q = h.q,
       .k = h.k,
       .v = h.v,
       .out = r[attn_].split_heads(spec_.heads, spec_.head_dim),
       .saved = r[lse_],
       .buffer = r[exchange_],
       .bounds = context_->bounds(r.batch()),
       .dropout = r.dropout(spec_.attention_dropout, layer_, DropoutSite::probabilities)});
}

void Attention::attend_across_ranks_backward(Run& r) const {
  const ModelSpec& m = spec_;
  const Tensor d_qkv = r[d_qkv_];
  parallel::ContextAttention::Backward a{
      .dout = r[d_attn_].split_heads(m.heads, m.head_dim),
      .q = {},
      .k = {},
      .v = {},
      .out = {},
      .dq = m.heads_of(d_qkv, 0, m.heads),
      .dk = m.heads_of(d_qkv, m.q_width(), m.kv_heads),
      .dv = m.heads_of(d_qkv, m.q_width() + m.kv_width(), m.kv_heads),
      .saved = r[lse_],
      .buffer = r[d_exchange_],
      .bounds = context_->bounds(r.batch()),
      .dropout = r.dropout(spec_.attention_dropout, layer_, DropoutSite::probabilities)};
  if (!context_->attention().saves_inputs()) {
    const Heads h = heads(r);
    a.q = h.q, a.k = h.k, a.v = h.v;
    a.out = r[attn_].split_heads(m.heads, m.head_dim);
  }
  context_->attention().backward(r.exec(), context_->groups(r), a);
}

}  // namespace nrl::model
