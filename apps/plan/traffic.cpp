#include "apps/plan/traffic.h"

#include <algorithm>
#include <set>

#include "core/base/error.h"
#include "core/ops/step.h"
#include "parallel/grid/groups.h"

namespace nrl::plan {

namespace {

/// Calls on buckets, and their elements.
struct Calls {
  int64_t count = 0, elements = 0;
  void add(const ParamGroup& g, int bucket) {
    ++count;
    elements += g.layout.buckets()[static_cast<size_t>(bucket)].size;
  }
};

/// Of a group's sharded gradients: once per microbatch.
Calls reductions(const RunPlan& plan, int group) {
  Calls out;
  for (const LayerTraffic& t : plan.traffic.training)
    for (const BucketRef& b : t.open)
      if (b.group == group) out.add(plan.groups[static_cast<size_t>(group)], b.bucket);
  return out;
}

/// Of a group's sharded weights.
Calls gathers(const RunPlan& plan, int group) {
  Calls out;
  std::set<BucketRef> gathered;
  for (const LayerTraffic& t : plan.traffic.training) {
    for (const auto* list : {&t.gather, &t.prefetch})
      for (const BucketRef& b : *list)
        if (b.group == group && gathered.insert(b).second)
          out.add(plan.groups[static_cast<size_t>(group)], b.bucket);
    for (const BucketRef& b : t.release) gathered.erase(b);
  }
  return out;
}

}  // namespace

std::vector<Traffic> step_traffic(const RunPlan& plan, const parallel::ProcessGrid& grid,
                                  std::span<const parallel::GroupId> groups) {
  const std::vector<parallel::GroupAlias> aliases = group_aliases(grid, groups);
  std::vector<Traffic> out;
  const auto add = [&](const parallel::GroupId& id, comm::Op op, int64_t count, int64_t bytes) {
    const auto alias = std::find_if(aliases.begin(), aliases.end(),
                                    [&](const parallel::GroupAlias& a) { return a.id == id; });
    NRL_CHECK(alias != aliases.end(), "group {} is not requested", name_of(id));
    const auto ranks = static_cast<int>(grid.members(id).size());
    if (ranks == 1) return;
    const auto same = std::find_if(out.begin(), out.end(),
                                   [&](const Traffic& t) { return t.group == alias->made && t.op == op; });
    if (same == out.end()) {
      out.push_back({alias->made, ranks, op, count, bytes});
      return;
    }
    same->count += count;
    same->bytes += bytes;
  };
  for (size_t i = 0; i < plan.groups.size(); ++i) {
    const ParamGroup& g = plan.groups[i];
    if (!g.trainable) continue;
    const Calls whole{static_cast<int64_t>(g.layout.buckets().size()), g.layout.total()};
    const Calls reduced = g.gradients_sharded ? reductions(plan, static_cast<int>(i)) : whole;
    const auto gradient = [&](comm::Op op) {
      add(g.shard_group(), op, reduced.count, reduced.elements * size_of(g.wire));
    };
    const bool scatter = g.strategy.optimizer_state;
    if (g.wire == DType::bf16 && g.fp32_sums) {
      gradient(comm::Op::all_to_all);
      if (!scatter) gradient(comm::Op::all_gather);
    } else {
      gradient(scatter ? comm::Op::reduce_scatter : comm::Op::all_reduce);
    }
    if (g.replicas > 1)
      add(g.replica_group(), comm::Op::all_reduce, whole.count, g.layout.shard_total() * size_of(g.gradient));
    if (!scatter) continue;
    const Calls gathered = g.weights_sharded ? gathers(plan, static_cast<int>(i)) : whole;
    add(g.weights_sharded ? g.gather_group() : g.shard_group(), comm::Op::all_gather, gathered.count,
        gathered.elements * size_of(g.weight));
  }
  add(parallel::group::all, comm::Op::all_reduce, 1, ops::StepScalar::sums * size_of(DType::f64));
  return out;
}

}  // namespace nrl::plan
