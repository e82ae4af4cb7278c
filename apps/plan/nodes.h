#pragma once
// The nodes of a run: which ranks they have, and what the grid costs on them.

#include <span>
#include <string>
#include <vector>

#include "core/base/cluster_node.h"
#include "core/config/load.h"
#include "core/tensor/tensor.h"

namespace nrl::plan {

/// The order in which nodes should take ranks: parallel::best_node_order(), or as they are where NVLink
/// domains depend on it (cluster.segment_size).
std::vector<int> node_order(const Config& config, std::span<const ClusterNode> nodes);

/// The nodes that the section `cluster` describes, for `world` ranks, in node_order(); empty: it does not
/// say. The configuration must have passed validate_for_world().
std::vector<ClusterNode> configured_nodes(const Config& config, int world);

/// The number of ranks on the node of every rank, itself included: of configured_nodes(); all of them if the
/// section does not say.
std::vector<int> local_sizes(const Config& config, int world);

/// How the groups of the grid lie on the nodes, in the order of the ranks. A tensor-parallel group on several
/// nodes (of several NVLink domains, cluster.segment_size) is an error on GPUs and a warning on CPUs, since
/// every layer would wait for the network; an expert group on several domains is an error. Other groups that
/// fit into a node and lie on several are a warning. `nodes` empty: unknown, nothing is checked.
Diagnostics check_nodes(const ConfigResult& result, std::span<const ClusterNode> nodes, DeviceType device);

/// "4 x node0, 4 x node1", for messages; at most `most` nodes.
std::string nodes_line(std::span<const ClusterNode> nodes, size_t most = 8);

}  // namespace nrl::plan
