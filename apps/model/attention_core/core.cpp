#include "apps/model/attention_core/core.h"

#include "core/ops/kernel_table.h"

namespace nrl::model {

std::unique_ptr<AttentionCore> attention_core(const LayerBuilder& b, const LayerContext& context,
                                              const AttentionEnds& ends) {
  return context.share ? attention_across_ranks(b, context, ends) : local_attention(b, ends);
}

AttentionCore::Heads AttentionCore::heads(const Run& r) const {
  const ModelSpec& m = spec_;
  const Tensor qk = r[ends_.keys];
  return {.q = m.heads_of(qk, 0, m.heads),
          .k = m.heads_of(qk, m.q_width(), m.kv_heads),
          .v = m.heads_of(r[ends_.values], m.q_width() + m.kv_width(), m.kv_heads)};
}

AttentionCore::Heads AttentionCore::gradients(const Run& r) const {
  const ModelSpec& m = spec_;
  const Tensor d_qkv = r[ends_.d_qkv];
  return {.q = m.heads_of(d_qkv, 0, m.heads),
          .k = m.heads_of(d_qkv, m.q_width(), m.kv_heads),
          .v = m.heads_of(d_qkv, m.q_width() + m.kv_width(), m.kv_heads)};
}

void AttentionCore::forward(Run& r) const {
  attend(r);
  r.step(memory::generation, "cached_attention", reads(ends_.keys, ends_.values), writes(ends_.out),
         [&] { attend_to_cache(r); });
}

void AttentionCore::attend_to_cache(Run& r) const {
  const ModelSpec& m = spec_;
  const PagedCache& cache = *r.batch().cache;
  const PagedCache::Layer& kept = cache.layers[layer_];
  ops::cache_write(r.exec(), {.keys = r[ends_.keys].columns(m.q_width(), m.kv_width()),
                              .values = r[ends_.values].columns(m.q_width() + m.kv_width(), m.kv_width()),
                              .slots = cache.slots,
                              .key_cache = kept.keys,
                              .value_cache = kept.values});
  ops::attention_paged(r.exec(), {.q = heads(r).q,
                                  .keys = kept.keys.split_heads(m.kv_heads, m.head_dim),
                                  .values = kept.values.split_heads(m.kv_heads, m.head_dim),
                                  .out = by_head(r[ends_.out]),
                                  .cu_q = r.batch().cu_seqlens,
                                  .context = cache.context,
                                  .block_table = cache.block_table,
                                  .page = cache.page,
                                  .scale = m.attention_scale(),
                                  .window = m.window(layer_),
                                  .longest = cache.longest});
}

}  // namespace nrl::model
