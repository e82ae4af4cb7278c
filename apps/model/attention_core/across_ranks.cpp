// Attention over the ranks that split every sequence (parallel/context).
#include "apps/model/attention_core/context_parallel.h"
#include "apps/model/attention_core/core.h"
#include "core/base/error.h"

namespace nrl::model {
namespace {

class AttentionAcrossRanks final : public AttentionCore {
 public:
  AttentionAcrossRanks(const LayerBuilder& b, const LayerContext& context, const AttentionEnds& ends)
      : AttentionCore(b, ends), context_(context, b.layer, b.recipe.activations()) {
    NRL_CHECK(!b.recipe.quantizes_attention(b.layer), "FP8 attention with context parallelism");
    const parallel::ContextAttention& a = context_.attention();
    const auto bytes = [&](std::string_view name, int64_t width, std::string_view rules = "") {
      return b.add({.name = name, .width = width, .dtype = DType::u8, .rules = rules});
    };
    saved_ = bytes("exchanged for attention", a.saved_width(), "core_attn");
    buffer_ = bytes("attention exchange", a.forward_width());
    d_buffer_ = bytes("d_attention exchange", a.backward_width());
  }

  void attend(Run& r) const override {
    r.step(memory::training | memory::evaluation | memory::recompute, "attention",
           reads(ends_.keys, ends_.values), writes(ends_.out, saved_, buffer_), [&] {
             const Heads h = heads(r);
             context_.attention().forward(r.exec(), context_.groups(r),
                                          {.q = h.q,
                                           .k = h.k,
                                           .v = h.v,
                                           .out = by_head(r[ends_.out]),
                                           .saved = r[saved_],
                                           .buffer = r[buffer_],
                                           .bounds = context_.bounds(r.batch()),
                                           .dropout = dropout(r)});
           });
  }

  void backward(Run& r) const override {
    const bool has_inputs = context_.attention().saves_inputs();
    const Reads inputs = has_inputs ? Reads{} : reads(ends_.keys, ends_.values, ends_.out);
    r.dgrad("attention", reads(ends_.d_out, saved_) | inputs, writes(ends_.d_qkv, d_buffer_), [&] {
      const Heads h = has_inputs ? Heads{} : heads(r), d = gradients(r);
      context_.attention().backward(r.exec(), context_.groups(r),
                                    {.dout = by_head(r[ends_.d_out]),
                                     .q = h.q,
                                     .k = h.k,
                                     .v = h.v,
                                     .out = has_inputs ? Tensor{} : by_head(r[ends_.out]),
                                     .dq = d.q,
                                     .dk = d.k,
                                     .dv = d.v,
                                     .saved = r[saved_],
                                     .buffer = r[d_buffer_],
                                     .bounds = context_.bounds(r.batch()),
                                     .dropout = dropout(r)});
    });
  }

 private:
  ContextParallel context_;
  Slot saved_;              ///< (N, saved_width()) u8: what the backward pass reads
  Slot buffer_, d_buffer_;  ///< (N, forward_width()) and (N, backward_width()) u8: memory of each pass
};

}  // namespace

std::unique_ptr<AttentionCore> attention_across_ranks(const LayerBuilder& b, const LayerContext& context,
                                                      const AttentionEnds& ends) {
  return std::make_unique<AttentionAcrossRanks>(b, context, ends);
}

}  // namespace nrl::model
