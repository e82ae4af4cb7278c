#include "apps/model/context_parallel.h"

#include <algorithm>

namespace nrl::model {
namespace {

const parallel::ContextExchange& exchange_of(const ModelLayout& layout, int layer) {
  return layout.exchanges.at(static_cast<size_t>(layer));
}

/// The ranks of a ring; those of an all-to-all are group::cp.inside(exchange.a2a).
parallel::GroupId ring_of(const parallel::ContextExchange& exchange) {
  return exchange.a2a > 1 ? parallel::group::cp.across_slices(exchange.a2a) : parallel::group::cp;
}

}  // namespace

ContextParallel::ContextParallel(const LayerContext& c, int layer, DType dtype)
    : exchange_(exchange_of(c.layout, layer)),
      attention_({.exchange = exchange_,
                  .zigzag = c.share.value(),
                  .heads = c.spec->heads,
                  .kv_heads = c.spec->kv_heads,
                  .d = c.spec->head_dim,
                  .dtype = dtype,
                  .window = c.spec->window,
                  .scale = c.spec->attention_scale()}) {
  const std::vector<parallel::ContextExchange> all = distinct_exchanges(c.layout);
  index_ = static_cast<size_t>(std::find(all.begin(), all.end(), exchange_) - all.begin());
}

std::span<const parallel::CallBounds> ContextParallel::bounds(const MicroBatch& batch) const {
  return batch.context_bounds.at(index_);
}

parallel::ContextGroups ContextParallel::groups(const Run& r) const {
  if (r.exec().needed) return {};
  NRL_CHECK(r.context().groups, "context parallelism without groups");
  const parallel::Groups& groups = *r.context().groups;
  if (exchange_.gather) return {.all = &groups[parallel::group::cp]};
  parallel::ContextGroups out;
  if (exchange_.a2a > 1) out.a2a = &groups[parallel::group::cp.inside(exchange_.a2a)];
  if (exchange_.a2a < r.context().layout.context) out.ring = &groups[ring_of(exchange_)];
  return out;
}

std::optional<ContextParallel> context_parallel(const LayerContext& context, int layer, DType dtype) {
  if (!context.share) return std::nullopt;
  return ContextParallel(context, layer, dtype);
}

size_t context_workspace(const LayerContext& context, DType dtype, DeviceType device, int partials) {
  size_t bytes = 0;
  for (int layer = 0; context.share && layer < context.spec->layers; ++layer) {
    const ContextParallel block(context, layer, dtype);
    const parallel::ContextAttention& attention = block.attention();
    bytes = std::max(bytes,
                     device == DeviceType::cuda ? attention.gpu_workspace() : attention.workspace(partials));
  }
  return bytes;
}

std::vector<parallel::GroupId> context_groups(std::span<const parallel::ContextExchange> exchanges,
                                              int size) {
  std::vector<parallel::GroupId> out;
  for (const parallel::ContextExchange& x : exchanges) {
    if (x.gather) {
      out.push_back(parallel::group::cp);
      continue;
    }
    if (x.a2a > 1) out.push_back(parallel::group::cp.inside(x.a2a));
    if (x.a2a < size) out.push_back(ring_of(x));
  }
  return out;
}

}  // namespace nrl::model
