#include "apps/model/attention_core/context_parallel.h"

#include <algorithm>

namespace nrl::model {
namespace {

const parallel::ContextExchange& exchange_of(const ModelLayout& layout, int layer) {
  return layout.exchanges.at(static_cast<size_t>(layer));
}

/// On a lane of its own, so that attention does not wait for gradients and weights that are communicated at
/// the same time: the data-parallel groups may have the same ranks.
constexpr parallel::GroupId all_ranks = parallel::group::cp.on_lane(2);

}  // namespace

parallel::GroupId context_group(const parallel::ContextExchange& exchange, parallel::ContextRanks ranks) {
  using Ranks = parallel::ContextRanks;
  if (exchange.a2a == 1 || ranks == Ranks::all) return all_ranks;
  return ranks == Ranks::a2a ? all_ranks.inside(exchange.a2a) : all_ranks.across_slices(exchange.a2a);
}

ContextParallel::ContextParallel(const LayerContext& c, int layer, DType dtype)
    : exchange_(exchange_of(c.layout, layer)),
      attention_({.exchange = exchange_,
                  .zigzag = c.share.value(),
                  .heads = c.spec->heads,
                  .kv_heads = c.spec->kv_heads,
                  .d = c.spec->head_dim,
                  .dtype = dtype,
                  .window = c.spec->window(layer),
                  .scale = c.spec->attention_scale(),
                  .slice = {.first = c.layout.tensor_rank * c.spec->heads,
                            .all = c.layout.tensor * c.spec->heads}}) {
  const std::vector<ContextKind> all = context_kinds(*c.spec, c.layout);
  const ContextKind own{exchange_, c.spec->window(layer)};
  index_ = static_cast<size_t>(std::find(all.begin(), all.end(), own) - all.begin());
}

std::span<const parallel::CallBounds> ContextParallel::bounds(const MicroBatch& batch) const {
  return batch.context_bounds.at(index_);
}

parallel::ContextGroups ContextParallel::groups(const Run& r) const {
  using Ranks = parallel::ContextRanks;
  NRL_CHECK(r.context().groups, "context parallelism without groups");
  const parallel::Groups& groups = *r.context().groups;
  const auto group = [&](parallel::ContextRanks ranks) { return &groups[context_group(exchange_, ranks)]; };
  if (exchange_.gather) return {.all = group(Ranks::all)};
  parallel::ContextGroups out;
  if (exchange_.a2a > 1) out.a2a = group(Ranks::a2a);
  if (exchange_.a2a < r.context().layout.context) out.ring = group(Ranks::ring);
  return out;
}

std::vector<parallel::GroupId> context_groups(std::span<const parallel::ContextExchange> exchanges,
                                              int size) {
  using Ranks = parallel::ContextRanks;
  std::vector<parallel::GroupId> out;
  for (const parallel::ContextExchange& x : exchanges) {
    if (x.gather) {
      out.push_back(context_group(x, Ranks::all));
      continue;
    }
    if (x.a2a > 1) out.push_back(context_group(x, Ranks::a2a));
    if (x.a2a < size) out.push_back(context_group(x, Ranks::ring));
  }
  return out;
}

}  // namespace nrl::model
