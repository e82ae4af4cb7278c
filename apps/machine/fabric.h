#pragma once
// The links between the ranks of a job: NVLink domains (nodes), and a network of adapters, leaf switches and
// a spine. Which of them a group of the process grid crosses follows from its strides; only nodes of
// different sizes need lists of ranks.

#include <array>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "apps/machine/device_models.h"
#include "core/base/cluster_node.h"
#include "core/config/config.h"
#include "parallel/comm/collective_log.h"
#include "parallel/grid/grid.h"

namespace nrl::machine {

/// A resource that an operation occupies: operations of one link wait for each other.
enum class Link : uint8_t {
  none,     ///< a group of one rank
  node,     ///< NVLink, or the memory of a node of CPUs
  adapter,  ///< the network adapters of the ranks
  to_host,  ///< from a rank's device to the memory of its host
  from_host,
  host,  ///< a rank's part of the host's processors and their memory
};
inline constexpr size_t link_count = static_cast<size_t>(Link::host) + 1;
/// All but Link::none.
inline constexpr std::array all_links{Link::node, Link::adapter, Link::to_host, Link::from_host, Link::host};
/// "NVLink", "adapter", ...
constexpr std::string_view name_of(Link link, bool gpu) {
  constexpr std::array<std::string_view, link_count> names{"",        "NVLink",    "adapter",
                                                           "to host", "from host", "host CPUs"};
  return link == Link::node && !gpu ? "memory of the node" : names[static_cast<size_t>(link)];
}

/// How a group lies on the fabric. Of the groups of a kind, the one with the least favorable place counts.
struct Crossing {
  int ranks = 1;    ///< members
  int domains = 1;  ///< NVLink domains that have members
  int inside = 1;   ///< members in the domain with the fewest
  bool rails =
      false;  ///< in several domains, at different places in them: their adapters have other switches
  bool spine = false;  ///< members lie behind different leaf switches

  bool operator==(const Crossing&) const = default;
};

/// The link that limits the operations of a group.
constexpr Link link_of(const Crossing& c) {
  return c.ranks == 1 ? Link::none : c.domains > 1 ? Link::adapter : Link::node;
}

/// A measured operation of a group, from a profile.
struct MeasuredOperation {
  comm::Op op = comm::Op::all_reduce;
  int ranks = 2, domains = 1;
  double bytes = 0;  ///< as in comm::CollectiveLog
  double seconds = 0;

  bool operator==(const MeasuredOperation&) const = default;
};

class Fabric {
 public:
  /// `nodes`: of the ranks, in their order. Empty: GPUs are on nodes of DeviceModel::node_ranks ranks, CPUs
  /// on one node. cluster.segment_size nodes make one NVLink domain; cluster.fabric describes the network.
  Fabric(const ClusterConfig& cluster, const DeviceModel& device, std::span<const ClusterNode> nodes,
         int world);

  /// Arithmetic on the strides of the grid where domains have equal sizes that fit them; elsewhere all groups
  /// of the kind are looked at. The grid must have the ranks of the fabric.
  Crossing crossing(const parallel::ProcessGrid& grid, const parallel::GroupId& id) const;
  /// For one group, by its world ranks.
  Crossing crossing(std::span<const int> members) const;

  /// Bytes/s each way of a rank inside its domain, and through its adapters to ranks in other domains, or,
  /// with `spine`, behind other leaf switches.
  double node_bandwidth() const { return node_.bandwidth; }
  double adapter_bandwidth(bool spine) const { return network_.bandwidth / (spine ? oversubscription_ : 1); }
  const LinkModel& node() const { return node_; }
  const LinkModel& network() const { return network_; }
  /// GPUs: operations run in kernels of NCCL, whose protocols collective_time.h chooses from.
  bool nccl() const { return nccl_; }
  /// GPUs whose NVLink switches add and multicast: from compute capability 9.0, more than two on a node.
  bool nvls() const { return nvls_; }
  int world() const { return world_; }
  /// Ranks of the largest NVLink domain.
  int domain_ranks() const { return domain_ranks_; }
  /// True if messages between adapters of different places in their nodes pass the spine.
  bool rail_optimized() const { return rail_optimized_; }

  /// Operations of these kinds are interpolated from measurements from now on.
  void set_measured(std::vector<MeasuredOperation> measured) { measured_ = std::move(measured); }
  const std::vector<MeasuredOperation>& measured() const { return measured_; }

 private:
  struct Place {
    int domain, index, leaf;
  };
  Place place_of(int rank) const;
  Crossing worst_of(const parallel::ProcessGrid& grid, const parallel::GroupId& id) const;

  int world_, domain_ranks_;
  bool nccl_, nvls_;
  std::vector<Place> places_;  // by rank; empty: equal nodes and domains
  LinkModel node_, network_;
  int leaf_ranks_;  // of whole nodes, at least one
  bool rail_optimized_;
  double oversubscription_;
  std::vector<MeasuredOperation> measured_;
};

}  // namespace nrl::machine
