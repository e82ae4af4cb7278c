#include "apps/plan/nodes.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "apps/plan/grid_position.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "parallel/grid/nodes.h"

namespace nrl::plan {
namespace {

/// Consecutive nodes joined to NVLink domains.
std::vector<ClusterNode> domains_of(std::span<const ClusterNode> nodes, int64_t segment) {
  std::vector<ClusterNode> out;
  for (size_t n = 0; n < nodes.size(); ++n) {
    if (static_cast<int64_t>(n) % segment == 0) {
      out.push_back(nodes[n]);
      continue;
    }
    out.back().name += "+" + nodes[n].name;
    out.back().ranks += nodes[n].ranks;
  }
  return out;
}

std::string ranks_text(const std::vector<int>& ranks) {
  if (ranks.size() <= 4) return fmt::format("{}", fmt::join(ranks, ", "));
  return fmt::format("{}, {}, ..., {}", ranks[0], ranks[1], ranks.back());
}

/// The first node that does not hold whole blocks.
const ClusterNode& uneven_node(std::span<const ClusterNode> nodes, int block) {
  return *std::find_if(nodes.begin(), nodes.end(),
                       [&](const ClusterNode& n) { return n.ranks % block != 0; });
}

}  // namespace

std::vector<int> node_order(const Config& config, std::span<const ClusterNode> nodes) {
  if (!config.cluster.segment_size) return parallel::best_node_order(grid_sizes(config), nodes);
  std::vector<int> given(nodes.size());
  std::iota(given.begin(), given.end(), 0);
  return given;
}

std::vector<ClusterNode> configured_nodes(const Config& config, int world) {
  const ClusterConfig& cluster = config.cluster;
  std::vector<int> ranks;
  if (cluster.gpus_per_node && cluster.gpus_per_node->size() > 1)
    for (const int64_t n : *cluster.gpus_per_node) ranks.push_back(static_cast<int>(n));
  else if (cluster.gpus_per_node && !cluster.gpus_per_node->empty())
    ranks.assign(static_cast<size_t>(world / cluster.gpus_per_node->front()),
                 static_cast<int>(cluster.gpus_per_node->front()));
  else if (cluster.num_nodes && world % *cluster.num_nodes == 0)
    ranks.assign(static_cast<size_t>(*cluster.num_nodes), static_cast<int>(world / *cluster.num_nodes));
  std::vector<ClusterNode> nodes;
  for (const int n : ranks) nodes.push_back({fmt::format("node{}", nodes.size()), n});
  std::vector<ClusterNode> ordered;
  for (const int n : node_order(config, nodes)) ordered.push_back(nodes[n]);
  return ordered;
}

std::vector<int> local_sizes(const Config& config, int world) {
  std::vector<int> sizes;
  for (const ClusterNode& node : configured_nodes(config, world))
    sizes.insert(sizes.end(), static_cast<size_t>(node.ranks), node.ranks);
  return sizes.empty() ? std::vector<int>(static_cast<size_t>(world), world) : sizes;
}

Diagnostics check_nodes(const ConfigResult& result, std::span<const ClusterNode> nodes, DeviceType device) {
  Diagnostics out;
  if (nodes.size() < 2) return out;
  const parallel::GridSizes sizes = grid_sizes(result.config);
  const auto& segment = result.config.cluster.segment_size;
  const std::vector<ClusterNode> domains = domains_of(nodes, segment.value_or(1));
  const std::vector<int> node_of = parallel::node_of_ranks(nodes),
                         domain_of = parallel::node_of_ranks(domains);
  const parallel::ProcessGrid grid(sizes, static_cast<int>(node_of.size()), 0);
  const char* place = segment ? "NVLink domain" : "node";
  bool tensor_spans = false;
  for (const auto& [id, key] : {std::pair(parallel::group::tp, "distributed.tensor_parallel_size"),
                                std::pair(parallel::group::etp, "distributed.expert_tensor_parallel_size")}) {
    const parallel::GroupsOnNodes on = groups_on_nodes(grid, id, domain_of);
    if (on.spanning == 0 || !result.sound(key)) continue;
    tensor_spans = true;
    const ClusterNode& node = uneven_node(domains, on.size);
    const bool gpu = device == DeviceType::cuda;
    out.push_back(diagnose(
        result, key,
        fmt::format(
            "{} is {}, but {} {} has {}: the group of ranks {} spans {}s, and every layer waits for the "
            "network",
            key, on.size, place, node.name, counted(node.ranks, "rank"), ranks_text(on.first), place),
        "",
        {fmt::format("give every {} a multiple of {} ranks, or use a size that divides the ranks of each",
                     place, on.size)},
        gpu ? Severity::error : Severity::warning));
  }
  if (const auto on = groups_on_nodes(grid, parallel::group::etp_ep, domain_of);
      segment && on.spanning > 0 && result.sound("cluster.segment_size"))
    out.push_back(diagnose(
        result, "cluster.segment_size",
        fmt::format(
            "cluster.segment_size is {}, but the expert group of ranks {} spans NVLink domains; {} has {}",
            *segment, ranks_text(on.first), uneven_node(domains, on.size).name,
            counted(uneven_node(domains, on.size).ranks, "rank")),
        "", {fmt::format("give every domain a multiple of {} ranks", on.size)}));
  if (tensor_spans) return out;
  const int smallest =
      std::min_element(nodes.begin(), nodes.end(), [](const ClusterNode& a, const ClusterNode& b) {
        return a.ranks < b.ranks;
      })->ranks;
  for (const auto& [id, key] : {std::pair(parallel::group::etp_ep, "distributed.expert_parallel_size"),
                                std::pair(parallel::group::tp_cp, "distributed.context_parallel_size")}) {
    const parallel::GroupsOnNodes on = groups_on_nodes(grid, id, node_of);
    if (on.spanning == 0 || on.size > smallest || !result.sound(key)) continue;
    const ClusterNode& node = uneven_node(nodes, on.size);
    out.push_back(
        diagnose(result, key,
                 fmt::format("{}: {} of {} groups {} (ranks {}, ...) span nodes, because {} has {}, not a "
                             "multiple of {}",
                             key, on.spanning, on.groups, name_of(id), ranks_text(on.first), node.name,
                             counted(node.ranks, "rank"), on.size),
                 "", {fmt::format("give every node a multiple of {} ranks", on.size)}, Severity::warning));
  }
  return out;
}

std::string nodes_line(std::span<const ClusterNode> nodes, size_t most) {
  std::string out;
  for (size_t n = 0; n < std::min(nodes.size(), most); ++n)
    out += fmt::format("{}{} x {}", n ? ", " : "", nodes[n].ranks, nodes[n].name);
  return nodes.size() <= most ? out : fmt::format("{}, ... ({} nodes)", out, nodes.size());
}

}  // namespace nrl::plan
