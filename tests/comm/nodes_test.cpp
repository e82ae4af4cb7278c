// How the groups of a grid lie on nodes.
#include "parallel/grid/nodes.h"

#include <numeric>

#include "tests/catch.h"
#include "tests/comm/backends.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using namespace nrl::parallel;

namespace {

std::vector<ClusterNode> nodes_with(const std::vector<int>& ranks) {
  std::vector<ClusterNode> nodes;
  for (const int n : ranks) nodes.push_back({"node" + std::to_string(nodes.size()), n});
  return nodes;
}

}  // namespace

TEST_CASE("ranks are on nodes in order", "[grid]") {
  const std::vector<ClusterNode> nodes = nodes_with({2, 1, 3});
  CHECK(node_of_ranks(nodes) == std::vector<int>{0, 0, 1, 2, 2, 2});
  const std::vector<std::string> hosts = {"node0", "node0", "node1", "node2", "node2", "node2"};
  CHECK(nodes_of(node_of_ranks(nodes), hosts) == nodes);
}

TEST_CASE("groups on several nodes are counted", "[grid]") {
  const ProcessGrid grid({.tp = 4, .pp = 2}, 16, 0);
  const std::vector<int> even = node_of_ranks(nodes_with({8, 8})), odd = node_of_ranks(nodes_with({6, 10}));
  const GroupsOnNodes inside = groups_on_nodes(grid, group::tp, even);
  CHECK(inside.groups == 4);
  CHECK(inside.size == 4);
  CHECK(inside.spanning == 0);
  CHECK(inside.first == std::vector<int>{0, 1, 2, 3});
  const GroupsOnNodes spanning = groups_on_nodes(grid, group::tp, odd);
  CHECK(spanning.spanning == 1);
  CHECK(spanning.first == std::vector<int>{4, 5, 6, 7});
  CHECK(groups_on_nodes(grid, group::pp, even).spanning == 8);
  CHECK(groups_on_nodes(grid, group::dp, even).spanning == 0);
  CHECK(groups_on_nodes(grid, group::pp, {}).spanning == 0);  // unknown nodes
}

TEST_CASE("nodes are ordered so that groups stay inside", "[grid]") {
  struct Case {
    GridSizes sizes;
    std::vector<int> ranks, order;
    NodeSpans spans;
  };
  // A tp group is part of the tp-cp group, which spans with it.
  const Case cases[] = {
      {{.tp = 4, .etp = 1}, {4, 8, 16}, {0, 1, 2}, {}},  // fits as it is
      {{.tp = 2, .cp = 4, .etp = 1}, {4, 8, 16, 4}, {2, 1, 0, 3}, {.context = 1}},
      {{.tp = 8, .etp = 1}, {4, 8, 8, 4}, {1, 2, 0, 3}, {.tensor = 1, .context = 1}},
      {{.ep = 8, .etp = 1}, {4, 8, 4}, {1, 0, 2}, {.expert = 1}},
      {{.tp = 4, .etp = 1}, {2, 2, 2, 2}, {0, 1, 2, 3}, {.tensor = 2, .context = 2}},  // nothing to choose
      {{.etp = 1}, {3, 5}, {0, 1}, {}}};
  for (const Case& c : cases) {
    const std::vector<ClusterNode> nodes = nodes_with(c.ranks);
    CAPTURE(c.ranks);
    REQUIRE(best_node_order(c.sizes, nodes) == c.order);
    std::vector<ClusterNode> ordered;
    for (const int n : c.order) ordered.push_back(nodes[n]);
    const NodeSpans spans = node_spans(c.sizes, ordered), given = node_spans(c.sizes, nodes);
    CHECK(spans.tensor == c.spans.tensor);
    CHECK(spans.expert == c.spans.expert);
    CHECK(spans.context == c.spans.context);
    CHECK(spans <= given);
  }
}

TEST_CASE("ranks of a world can be renumbered", "[grid]") {
  comm::World& world = test_world();
  backends().clear();  // they refer to the communicator that the world replaces
  const int size = world.size(), before = world.rank();
  const std::vector<std::string> hosts = world.hosts();
  const std::vector<int> nodes = world.nodes(), start = world.launched();
  std::vector<int> reversed(static_cast<size_t>(size));
  std::iota(reversed.rbegin(), reversed.rend(), 0);
  for (int times = 1; times <= 2; ++times) {  // the second time restores the order
    world.reorder(reversed);
    const int rank = times == 1 ? size - 1 - before : before;
    REQUIRE(world.rank() == rank);
    REQUIRE(world.comm().rank() == rank);
    std::vector<int> launched(static_cast<size_t>(size));
    world.comm().all_gather(std::vector<int>{start[before]}, launched);
    REQUIRE(world.launched() == launched);
    REQUIRE(launched == (times == 1 ? std::vector<int>(start.rbegin(), start.rend()) : start));
    REQUIRE(world.hosts() == hosts);  // one machine
    for (int r = 0; r < size; ++r) {
      const int expected = times == 1 ? nodes.back() - nodes[size - 1 - r] : nodes[r];
      REQUIRE(world.nodes()[r] == expected);
    }
    // Groups made from it have the new numbers, and its collectives work.
    const auto half = world.comm().split(rank % 2, rank, "half");
    std::vector<int64_t> sum = {rank};
    half->all_reduce(sum);
    int64_t expected = 0;
    for (int r = rank % 2; r < size; r += 2) expected += r;
    REQUIRE(sum[0] == expected);
    REQUIRE(half->members().front() == rank % 2);
  }
  std::string why_not;
  REQUIRE(open_backends(world, why_not));
}
