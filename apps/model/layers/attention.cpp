#include "apps/model/attention_core/core.h"
#include "apps/model/layers/sublayer.h"
#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::model {
namespace {

using precision::Gemm;

// N tokens of the microbatch, D head size; heads count this rank's part (tensor_part()).
class Attention final : public Sublayer {
 public:
  Attention(const LayerBuilder& b, const LayerContext& context, const LayerParameters& p, const Ends& ends)
      : Sublayer(b, ends, DropoutSite::attention),
        p_(p),
        qkv_proj_(b, {.name = "qkv",
                      .gemm = Gemm::qkv,
                      .weight = p.qkv,
                      .bias = p.qkv_bias,
                      .adapter = p.qkv_adapter,
                      .in = b.spec.hidden,
                      .out = b.spec.qkv_width(),
                      .rules = "norm"}),
        o_proj_(b, {.name = "o_proj",
                    .gemm = Gemm::o_proj,
                    .weight = p.o,
                    .bias = p.o_bias,
                    .adapter = p.o_adapter,
                    .in = b.spec.q_width(),
                    .out = b.spec.hidden,
                    .split = Split::inputs,
                    .rules = "core_attn"}),
        norm_(b, ends.in, p.norm1, p.norm1_bias, qkv_proj_.reads_x()) {
    const ModelSpec& m = b.spec;
    qkv_ = b.activation("qkv", m.qkv_width(), token_rows, "qkv");
    if (m.qk_norm) {
      qk_ = b.activation("qk", m.q_width() + m.kv_width(), token_rows, "qkv");
      qk_stats_ = b.add({.name = "qk statistics", .width = m.heads + m.kv_heads, .rules = "qkv"});
    } else if (m.use_rope) {
      qk_ = b.activation("rotated qkv", m.qkv_width(), token_rows, "qkv");
    }
    const Slot keys = qk_ ? qk_ : qkv_, values = m.qk_norm ? qkv_ : keys;
    const Slot out = b.activation("attention", m.q_width(), token_rows, "core_attn"),
               d_out = b.gradient("d_attention", m.q_width(), token_rows);
    d_qkv_ = b.gradient("d_qkv", m.qkv_width(), token_rows);
    core_ = attention_core(b, context,
                           {.keys = keys, .values = values, .out = out, .d_out = d_out, .d_qkv = d_qkv_});
    add_output(b, "projection", "d_projection", p.post_norm1);
    d_norm_ = b.gradient("d_norm1", m.hidden, sequence_rows);
    qkv_proj_.connect(b, {.x = norm_.out, .y = qkv_, .d_y = d_qkv_, .d_x = d_norm_});
    o_proj_.connect(b, {.x = out, .y = out_, .d_y = d_y_, .d_x = d_out});
    if (measures_rotated()) d_qkv_amax_ = b.number("d_qkv amax");
    add_amax(b, o_proj_);
    attn_ = out;
  }

  Stream stream() const override { return stream_after(norm_); }

  void forward(Run& r) override {
    qkv_proj_.forward(r, norm_.forward(r, qkv_proj_.x_amax()));
    if (spec_.qk_norm)
      r.step("qk_norm_rope", reads(qkv_), writes(qk_, qk_stats_), [&] { rotate(r); });
    else if (spec_.use_rope)
      r.step("rope", reads(qkv_), writes(over(qk_, qkv_)), [&] { rotate(r); });
    core_->forward(r);
    o_proj_.forward(r, {attn_});
    normalize_output(r);
  }

  void backward(Run& r) override {
    o_proj_.backward(r, output_gradient(r, "projection_dropout"));
    core_->backward(r);
    if (spec_.qk_norm)
      r.dgrad("qk_norm_rope", reads(d_qkv_, qkv_, qk_stats_), writes(d_qkv_), [&] { rotate_backward(r); });
    else if (spec_.use_rope)
      r.dgrad("rope", reads(d_qkv_), writes(d_qkv_, d_qkv_amax_), [&] { rotate_backward(r); });
    qkv_proj_.backward(r, {.slot = d_qkv_, .amax = d_qkv_amax_});
    norm_.backward(r, d_norm_, ends_.d_out, ends_.d_x);
  }

 private:
  void rotate(const Run& r) const;
  void rotate_backward(const Run& r) const;
  /// True if the scale of d_qkv needs its amax, RoPE writes all of dq and dk, and an op reads dv alone
  /// (ops::QuantizeSource).
  bool measures_rotated() const {
    return qkv_proj_.d_y_amax() && spec_.use_rope && !spec_.qk_norm &&
           spec_.rope(layer_).rotary_dim == spec_.head_dim && spec_.kv_width() % 16 == 0;
  }
  static Tensor flat(const Tensor& t) { return make_tensor(t.data, t.dtype, {t.numel()}); }

  LayerParameters p_;
  Linear qkv_proj_, o_proj_;
  PreNorm norm_;
  std::unique_ptr<AttentionCore> core_;
  Slot qkv_;             ///< (N, qkv_width)
  Slot qk_;              ///< after RoPE: qkv (N, qkv_width); with QK norm q and k (N, q_width + kv_width)
  Slot qk_stats_;        ///< (N, heads + kv_heads) f32, with QK norm
  Slot attn_;            ///< (N, heads * D)
  Slot d_qkv_, d_norm_;  ///< (N, qkv_width), (n, H)
  Slot d_qkv_amax_;      ///< (1) f32; unset if no op computes the amax of d_qkv
};

void Attention::rotate(const Run& r) const {
  const ModelSpec& m = spec_;
  const int64_t heads = m.heads + m.kv_heads;
  const Tensor qkv = r[qkv_], qk = r[qk_];
  ops::QkNormRopeForward a{.x = m.heads_of(qkv, 0, heads), .out = m.heads_of(qk, 0, heads), .heads = m.heads};
  if (m.qk_norm) {
    a.q_weight = r.weight(p_.q_norm), a.k_weight = r.weight(p_.k_norm);
    a.weight_offset = m.norm_offset;
    a.eps = m.norm_eps;
    a.rstd = flat(r[qk_stats_]);
  } else {
    if (qk.data != qkv.data) ops::copy(r.exec(), qkv, qk);
    a.x = a.out;
  }
  if (m.use_rope) a.table = r.context().rope_table(layer_), a.positions = r.batch().positions;
  ops::qk_norm_rope_forward(r.exec(), a);
}

void Attention::rotate_backward(const Run& r) const {
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
    a.weight_offset = m.norm_offset;
    a.rstd = flat(r[qk_stats_]);
    a.dq_weight = r.grad(p_.q_norm), a.dk_weight = r.grad(p_.k_norm);
  }
  if (m.use_rope) a.table = r.context().rope_table(layer_), a.positions = r.batch().positions;
  a.amax = amax;
  ops::qk_norm_rope_backward(r.exec(), a);
  r.gradient_ready({p_.k_norm, p_.q_norm});
}

}  // namespace

std::unique_ptr<Sublayer> attention(const LayerBuilder& b, const LayerContext& context,
                                    const LayerParameters& p, const Sublayer::Ends& ends) {
  return std::make_unique<Attention>(b, context, p, ends);
}

}  // namespace nrl::model
