#include "apps/planner/report_grid.h"

#include <spdlog/fmt/ranges.h>

#include "apps/plan/nodes.h"
#include "apps/plan/traffic.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "parallel/grid/groups.h"
#include "parallel/grid/nodes.h"

namespace nrl::planner {
namespace {

// "[0,2,4,6]", shortened above 8 members.
std::string members_text(const std::vector<int>& group) {
  constexpr size_t shown = 8;
  if (group.size() <= shown) return fmt::format("[{}]", fmt::join(group, ","));
  return fmt::format("[{},...,{}]", fmt::join(group.begin(), group.begin() + shown - 1, ","), group.back());
}

void print_groups(const parallel::ProcessGrid& grid, std::span<const parallel::GroupAlias> aliases,
                  std::span<const int> node_of) {
  log::info("groups   {}", node_of.empty()
                               ? "of ranks; set cluster.gpus_per_node to see those on several nodes"
                               : "of ranks");
  for (const parallel::GroupAlias& made : aliases) {
    if (made.id != made.made || grid.members(made.id).size() == 1) continue;
    std::string names;
    for (const parallel::GroupAlias& a : aliases)
      if (a.made == made.id) names += (names.empty() ? "" : ", ") + name_of(a.id);
    const std::vector<std::vector<int>> all = grid.groups(made.id);
    std::string first;
    for (size_t g = 0; g < std::min<size_t>(all.size(), 2); ++g) first += " " + members_text(all[g]);
    const int spanning = groups_on_nodes(grid, made.id, node_of).spanning;
    log::info("  {}  {} of {} ranks:{}{}{}", names, all.size(), all.front().size(), first,
              all.size() > 2 ? " ..." : "",
              node_of.empty() ? ""
              : spanning == 0 ? "; inside nodes"
                              : fmt::format("; {} on several nodes", spanning));
  }
}

}  // namespace

void print_grid(const Config& config, const plan::RunPlan& plan, std::span<const plan::Traffic> traffic) {
  const plan::GridPosition& position = plan.position;
  const parallel::ProcessGrid& grid = position.grid;
  log::info("grid     {}", plan::grid_line(position, name_of(config.distributed.shard_strategy)));
  if (const parallel::GridPoint& e = grid.expert().sizes(); e.ep > 1 || e.tp > 1)
    log::info("experts  {} ranks = etp {} x ep {} x edp {} x pp {}", grid.ranks(), e.tp, e.ep, e.dp, e.pp);
  if (grid.ranks() == 1) return;
  const std::vector<ClusterNode> nodes = plan::configured_nodes(config, grid.ranks());
  if (!nodes.empty()) log::info("nodes    {}, in the order of the ranks", plan::nodes_line(nodes));
  print_groups(grid, group_aliases(grid, plan.group_ids), parallel::node_of_ranks(nodes));
  log::info("traffic  of {} per step", rank_list({grid.rank()}));
  for (const plan::Traffic& t : plan::by_operation(traffic))
    log::info("  {}  {}  {}, {} bytes, {} sent{}", name_of(t.group), name_of(t.op), counted(t.count, "call"),
              grouped(t.bytes), grouped(static_cast<int64_t>(t.wire())),
              t.balanced() ? " if experts are equally busy" : "");
}

std::string rank_list(const std::vector<int>& ranks, size_t most) {
  std::string text;
  size_t ranges = 0;
  for (size_t i = 0; i < ranks.size(); ++ranges) {
    if (ranges == most) return fmt::format("ranks {}, ... ({} ranks)", text, ranks.size());
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    text += text.empty() ? "" : ", ";
    text += end == i + 1 ? std::to_string(ranks[i]) : fmt::format("{}-{}", ranks[i], ranks[end - 1]);
    i = end;
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

}  // namespace nrl::planner
