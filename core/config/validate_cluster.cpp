// The section `cluster` against the job.
#include <numeric>

#include <spdlog/fmt/ranges.h>

#include "core/config/validate.h"

namespace nrl::config_detail {
namespace {

void check_gpus_per_node(Checker& c, const ClusterConfig& cluster, int64_t world,
                         std::span<const ClusterNode> nodes) {
  constexpr const char* key = "cluster.gpus_per_node";
  const std::vector<int64_t>& given = *cluster.gpus_per_node;
  if (given.empty()) {
    c.error(key, fmt::format("{} is an empty list", key), "", {"give one number per node, or remove it"});
    return;
  }
  const bool each = given.size() == 1;
  if (nodes.empty()) {
    const int64_t sum = std::accumulate(given.begin(), given.end(), int64_t{0});
    const int64_t nodes_of_each = cluster.num_nodes.value_or(world / given[0]);
    const bool fits = each ? nodes_of_each * given[0] == world : sum == world;
    if (!fits)
      c.error(key, fmt::format("{}: {} of {} ranks do not make {} rank{}", key,
                               each ? fmt::format("{} node{}", nodes_of_each, nodes_of_each == 1 ? "" : "s")
                                    : "nodes",
                               each ? std::to_string(given[0]) : fmt::format("{}", fmt::join(given, ", ")),
                               world, world == 1 ? "" : "s"));
    return;
  }
  if (!each && given.size() != nodes.size()) {
    c.error(key, fmt::format("{} lists {} nodes, but the ranks run on {}", key, given.size(), nodes.size()));
    return;
  }
  for (size_t n = 0; n < nodes.size(); ++n) {
    const int64_t wanted = given[each ? 0 : n];
    if (nodes[n].ranks == wanted) continue;
    c.error(key,
            fmt::format("{} is {} for node {} ({}), which has {} rank{}", key, wanted, n, nodes[n].name,
                        nodes[n].ranks, nodes[n].ranks == 1 ? "" : "s"),
            "",
            {each ? fmt::format("start it with mpirun --map-by ppr:{}:node", wanted)
                  : "list the hosts with these numbers of slots in mpirun's --hostfile"});
    return;
  }
}

}  // namespace

std::string with_ranks(int64_t ranks, RankCount count) {
  return fmt::format("{} {}", count == RankCount::planned ? "plan with --world" : "start it with mpirun -n",
                     ranks);
}

void check_cluster(Checker c, int64_t world, std::span<const ClusterNode> nodes, RankCount count) {
  const ClusterConfig& cluster = c.result.config.cluster;
  if (cluster.world_size && *cluster.world_size != world)
    c.error("cluster.world_size",
            count == RankCount::planned
                ? fmt::format("cluster.world_size is {}, but the plan is for {} rank{}", *cluster.world_size,
                              world, world == 1 ? "" : "s")
                : fmt::format("cluster.world_size is {}, but {} rank{} started", *cluster.world_size, world,
                              world == 1 ? " was" : "s were"),
            "", {with_ranks(*cluster.world_size, count)});
  const auto found = static_cast<int64_t>(nodes.size());
  if (cluster.num_nodes && found > 0 && *cluster.num_nodes != found)
    c.error("cluster.num_nodes",
            fmt::format("cluster.num_nodes is {}, but the ranks run on {}", *cluster.num_nodes, found));
  if (cluster.gpus_per_node && c.sound({"cluster.num_nodes"})) check_gpus_per_node(c, cluster, world, nodes);
  if (cluster.segment_size && found > 0 && found % *cluster.segment_size != 0)
    c.error("cluster.segment_size",
            fmt::format("cluster.segment_size is {}, but {} node{} not a multiple of it",
                        *cluster.segment_size, found, found == 1 ? " is" : "s are"));
}

}  // namespace nrl::config_detail
