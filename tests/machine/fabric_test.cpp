#include "apps/machine/fabric.h"

#include <random>
#include <set>

#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;
using machine::Crossing;
using machine::DeviceModel;
using machine::Fabric;
using parallel::GroupId;
namespace group = parallel::group;

namespace {

const DeviceModel& h100() {
  return machine::find_device_model("--device", "h100");
}

std::vector<ClusterNode> nodes_of(const std::vector<int>& ranks) {
  std::vector<ClusterNode> out;
  for (const int n : ranks) out.push_back({fmt::format("node{}", out.size()), n});
  return out;
}
std::vector<ClusterNode> equal_nodes(int world, int each) {
  return nodes_of(std::vector<int>(static_cast<size_t>(world / each), each));
}

}  // namespace

TEST_CASE("the crossing of a group by strides is that of the list of its ranks", "[machine]") {
  std::mt19937 random(7);
  const auto one_of = [&](std::vector<int> values) { return values[random() % values.size()]; };
  int spanning = 0, checked = 0;
  for (int i = 0; i < 500; ++i) {
    const int tp = one_of({1, 2, 3, 4, 8}), cp = one_of({1, 2, 4}), pp = one_of({1, 2, 3, 4}),
              dp = one_of({1, 2, 3, 4, 8}), world = tp * cp * pp * dp, stage = world / pp;
    const int ep = stage % 4 == 0 ? one_of({1, 2, 4}) : 1, etp = stage % (ep * tp) == 0 ? one_of({1, tp}) : 1;
    std::vector<int> units;
    for (int u = 1; u <= world; ++u)
      if (world % u == 0) units.push_back(u);
    ClusterConfig cluster;
    cluster.fabric.oversubscription = one_of({1, 2});
    cluster.fabric.leaf_ranks = one_of({4, 8, 16, 24, 256});
    const Fabric fabric(cluster, h100(), equal_nodes(world, one_of(units)), world);
    const parallel::ProcessGrid grid({.tp = tp, .cp = cp, .pp = pp, .ep = ep, .etp = etp}, world, 0);
    std::vector<GroupId> ids{group::tp,    group::cp,       group::dp,    group::pp,     group::dp_cp,
                             group::tp_pp, group::etp,      group::ep,    group::edp,    group::all,
                             group::tied,  group::tp_dp_cp, group::tp_cp, group::etp_ep, group::etp_ep_pp};
    for (const int slice : {2, 4})
      if (grid.group_size(group::dp_cp) % slice == 0) {
        ids.push_back(group::dp_cp.inside(slice));
        ids.push_back(group::dp_cp.across_slices(slice));
      }
    for (const GroupId& id : ids) {
      INFO(fmt::format("tp {} cp {} pp {} ep {} etp {} of {}, domains of {}: {}", tp, cp, pp, ep, etp, world,
                       fabric.domain_ranks(), name_of(id)));
      const Crossing c = fabric.crossing(grid, id);
      // One of the groups lies like this, and none spans more domains with fewer members in each.
      bool found = false;
      for (const std::vector<int>& members : grid.groups(id)) {
        const Crossing listed = fabric.crossing(members);
        found = found || listed == c;
        REQUIRE((listed.domains == 1 || (c.domains > 1 && listed.inside >= c.inside) || c.spine));
        REQUIRE((!listed.spine || c.spine));
        ++checked;
      }
      REQUIRE(found);
      if (c.domains > 1) ++spanning;
    }
  }
  CHECK(spanning > 2000);
  CHECK(checked > 10000);
}

TEST_CASE("nodes of different sizes are looked at one by one", "[machine]") {
  const Fabric fabric({}, h100(), nodes_of({4, 2, 6}), 12);
  const parallel::ProcessGrid grid({.tp = 4}, 12, 0);
  // Ranks 4 to 7 have two ranks on each of two nodes.
  CHECK(fabric.crossing(grid, group::tp) == Crossing{.ranks = 4, .domains = 2, .inside = 2, .rails = true});
  // Ranks 1, 5, 9: all in other nodes, at places 1, 1 and 3.
  const std::vector<int> replicas{1, 5, 9};
  CHECK(fabric.crossing(replicas) == Crossing{.ranks = 3, .domains = 3, .inside = 1, .rails = true});
  CHECK(link_of(fabric.crossing(std::vector<int>{6, 9})) == machine::Link::node);
  CHECK(link_of(fabric.crossing(std::vector<int>{3})) == machine::Link::none);
}

TEST_CASE("NVLink domains join nodes, and GPUs have nodes where none are configured", "[machine]") {
  ClusterConfig cluster;
  const parallel::ProcessGrid grid({.tp = 8}, 144, 0);
  const auto domains = [&](const GroupId& id) {
    return Fabric(cluster, h100(), equal_nodes(144, 4), 144).crossing(grid, id).domains;
  };
  CHECK(domains(group::tp) == 2);
  for (const auto& [nodes, tensor, all] : {std::tuple(2, 1, 18), std::tuple(9, 2, 4), std::tuple(18, 1, 2)}) {
    cluster.segment_size = nodes;  // 8, 36 and 72 ranks
    CHECK(domains(group::tp) == tensor);
    CHECK(domains(group::all) == all);
  }
  CHECK(Fabric({}, h100(), {}, 64).crossing(parallel::ProcessGrid({.tp = 8}, 64, 0), group::all) ==
        Crossing{.ranks = 64, .domains = 8, .inside = 8, .rails = true});
  CHECK(Fabric({}, machine::find_device_model("--device", "gb200"), {}, 72).domain_ranks() == 72);
  const DeviceModel cpu = machine::usual_model(DeviceType::cpu, 1, precision::Recipe{});
  CHECK(Fabric({}, cpu, {}, 64).domain_ranks() == 64);
}

TEST_CASE("a leaf switch has whole nodes", "[machine]") {
  ClusterConfig cluster;
  cluster.fabric.oversubscription = 2;
  const auto spine = [&](const std::vector<int>& sizes, int leaf_ranks, const std::vector<int>& ranks) {
    int world = 0;
    for (const int n : sizes) world += n;
    cluster.fabric.leaf_ranks = leaf_ranks;
    return Fabric(cluster, h100(), nodes_of(sizes), world).crossing(ranks).spine;
  };
  // A leaf for 12 ranks has one node of 8: ranks 7 and 8 are behind different ones.
  CHECK(spine({8, 8, 8}, 12, {7, 8}));
  CHECK_FALSE(spine({8, 8, 8}, 16, {7, 8}));
  CHECK(spine({8, 8, 8}, 23, {0, 16}));
  CHECK_FALSE(spine({8, 8, 8}, 24, {0, 16}));
  CHECK(spine({8, 8}, 4, {0, 8}));  // at least one node
  // Nodes of several sizes, as long as they have room.
  CHECK_FALSE(spine({4, 2, 6}, 6, {3, 4}));
  CHECK(spine({4, 2, 6}, 6, {5, 6}));
  // The same from strides.
  cluster.fabric.leaf_ranks = 12;
  const parallel::ProcessGrid grid({.tp = 8}, 16, 0);
  CHECK(Fabric(cluster, h100(), equal_nodes(16, 8), 16).crossing(grid, group::dp).spine);
}

TEST_CASE("nothing is listed for a large grid", "[machine]") {
  // Lists of its 2^20 ranks for 10,000 groups would take minutes.
  const int world = 1 << 20;
  const Fabric fabric({}, h100(), {}, world);
  const parallel::ProcessGrid grid({.tp = 8, .pp = 16}, world, 0);
  for (int i = 0; i < 10'000; ++i) REQUIRE(fabric.crossing(grid, group::dp_cp).domains == world / 128);
}

TEST_CASE("cluster.fabric sets the adapters", "[machine]") {
  ClusterConfig cluster;
  CHECK(Fabric(cluster, h100(), {}, 16).adapter_bandwidth(false) == Approx(46e9));
  cluster.fabric.adapters_per_rank = 0.5;
  cluster.fabric.adapter_gbit = 200;
  cluster.fabric.oversubscription = 4;
  const Fabric fabric(cluster, h100(), {}, 16);
  CHECK(fabric.adapter_bandwidth(false) == Approx(11.5e9));
  CHECK(fabric.adapter_bandwidth(true) == Approx(11.5e9 / 4));
}
