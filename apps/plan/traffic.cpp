#include "apps/plan/traffic.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/ops/step.h"
#include "parallel/grid/groups.h"

namespace nrl::plan {

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
  for (const ParamGroup& g : plan.groups) {
    if (!g.trainable) continue;
    const auto buckets = static_cast<int64_t>(g.layout.buckets().size());
    const int64_t gradients = g.layout.total() * size_of(DType::f32),
                  weights = g.layout.total() * size_of(g.weight);
    if (!g.strategy.optimizer_state) {
      add(g.reduce, comm::Op::all_reduce, buckets, gradients);
      continue;
    }
    add(g.reduce, comm::Op::reduce_scatter, buckets, gradients);
    add(g.reduce, comm::Op::all_gather, buckets, weights);
  }
  add(parallel::group::all, comm::Op::all_reduce, 1, ops::StepScalar::sums * size_of(DType::f64));
  return out;
}

}  // namespace nrl::plan
