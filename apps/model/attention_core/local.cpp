// Attention on a rank that has all tokens of its sequences.
#include "apps/model/attention_core/core.h"
#include "apps/model/linear/quantized_value.h"
#include "core/ops/kernel_table.h"

namespace nrl::model {
namespace {

using precision::Gemm;
using precision::Role;

class LocalAttention final : public AttentionCore {
 public:
  LocalAttention(const LayerBuilder& b, const AttentionEnds& ends) : AttentionCore(b, ends) {
    const ModelSpec& m = b.spec;
    const auto operand = [&](Gemm gemm, Role role, int64_t width) {
      return QuantizedValue(b, {.gemm = gemm,
                                .role = role,
                                .width = width,
                                .divided = true,
                                .row_rules = role == Role::input ? "qkv" : "",
                                .column = false,
                                .generation = false});
    };
    q_ = operand(Gemm::attention_q, Role::input, m.q_width());
    k_ = operand(Gemm::attention_k, Role::input, m.kv_width());
    v_ = operand(Gemm::attention_v, Role::input, m.kv_width());
    d_out_ = operand(Gemm::attention_out, Role::gradient, m.q_width());
    lse_ = b.add({.name = "lse", .width = m.heads, .rules = "core_attn"});
  }

  void attend(Run& r) const override {
    if (q_) {
      const int64_t q = spec_.q_width(), kv = spec_.kv_width();
      q_.forward_steps(r, {.slot = ends_.keys, .column = 0, .columns = q});
      k_.forward_steps(r, {.slot = ends_.keys, .column = q, .columns = kv});
      v_.forward_steps(r, {.slot = ends_.values, .column = q + kv, .columns = kv});
    }
    r.step(memory::training | memory::evaluation | memory::recompute, "attention", operand_reads(),
           writes(ends_.out, lse_), [&] {
             const Heads h = operands(r);
             ops::attention_forward(r.exec(), {.q = h.q,
                                               .k = h.k,
                                               .v = h.v,
                                               .out = by_head(r[ends_.out]),
                                               .lse = lse(r),
                                               .cu_q = r.batch().cu_seqlens,
                                               .cu_k = r.batch().cu_seqlens,
                                               .scale = spec_.attention_scale(),
                                               .window = spec_.window(layer_),
                                               .lengths = r.batch().lengths,
                                               .dropout = dropout(r),
                                               .slice = slice(r)});
           });
  }

  void backward(Run& r) const override {
    if (d_out_) d_out_.backward_step(r, {.slot = ends_.d_out});
    const Reads d_out = d_out_ ? d_out_.row_reads() : reads(ends_.d_out);
    r.dgrad("attention", d_out | operand_reads() | reads(ends_.out, lse_), writes(ends_.d_qkv), [&] {
      const Heads h = operands(r), d = gradients(r);
      ops::attention_backward(r.exec(), {.dout = by_head(d_out_ ? d_out_.row(r) : r[ends_.d_out]),
                                         .q = h.q,
                                         .k = h.k,
                                         .v = h.v,
                                         .out = by_head(r[ends_.out]),
                                         .lse = lse(r),
                                         .cu_q = r.batch().cu_seqlens,
                                         .cu_k = r.batch().cu_seqlens,
                                         .dq = d.q,
                                         .dk = d.k,
                                         .dv = d.v,
                                         .scale = spec_.attention_scale(),
                                         .window = spec_.window(layer_),
                                         .lengths = r.batch().lengths,
                                         .dropout = dropout(r),
                                         .slice = slice(r)});
    });
  }

 private:
  /// The heads as attention reads them: in FP8, if the recipe says so.
  Heads operands(const Run& r) const {
    if (!q_) return heads(r);
    const ModelSpec& m = spec_;
    return {.q = q_.row(r).split_heads(m.heads, m.head_dim),
            .k = k_.row(r).split_heads(m.kv_heads, m.head_dim),
            .v = v_.row(r).split_heads(m.kv_heads, m.head_dim)};
  }
  Reads operand_reads() const {
    return q_ ? q_.row_reads() | k_.row_reads() | v_.row_reads() : reads(ends_.keys, ends_.values);
  }
  Tensor lse(const Run& r) const {
    const Tensor t = r[lse_];
    return make_tensor(t.data, t.dtype, {t.dim(1), t.dim(0)});
  }
  /// The rank's heads among all.
  ops::HeadSlice slice(const Run& r) const {
    const ModelLayout& layout = r.layout();
    return {.first = layout.tensor_rank * spec_.heads, .all = layout.tensor * spec_.heads};
  }

  QuantizedValue q_, k_, v_, d_out_;  ///< FP8 operands, if attention reads FP8
  Slot lse_;                          ///< (heads, N) f32
};

}  // namespace

std::unique_ptr<AttentionCore> local_attention(const LayerBuilder& b, const AttentionEnds& ends) {
  return std::make_unique<LocalAttention>(b, ends);
}

}  // namespace nrl::model
