// How the groups of a configuration lie on nodes.
#include "apps/plan/nodes.h"

#include "tests/catch.h"
#include "tests/config/helpers.h"

using namespace nrl;
using namespace nrl::test;

namespace {

std::vector<ClusterNode> nodes_with(const std::vector<int>& ranks) {
  std::vector<ClusterNode> nodes;
  for (const int n : ranks) nodes.push_back({"node" + std::to_string(nodes.size()), n});
  return nodes;
}

struct Sizes {
  int tp = 1, cp = 1, ep = 1;
};

ConfigResult config_of(const Sizes& sizes, std::vector<std::string> overrides = {}) {
  ConfigResult result = load_base(std::move(overrides));
  REQUIRE(result.ok());
  result.config.distributed.tensor_parallel_size = sizes.tp;
  result.config.distributed.context_parallel_size = sizes.cp;
  result.config.distributed.expert_parallel_size = sizes.ep;
  return result;
}

std::string complaints(const ConfigResult& result, const std::vector<int>& ranks, DeviceType device,
                       Exit exit) {
  const Diagnostics found = plan::check_nodes(result, nodes_with(ranks), device);
  const std::string text = render(found);
  INFO(text);
  CHECK(exit_code(found) == exit);
  return text;
}

}  // namespace

TEST_CASE("a tensor-parallel group on several nodes is refused on GPUs", "[plan]") {
  const ConfigResult result = config_of({.tp = 4});
  for (const std::vector<int>& whole : {std::vector{16}, std::vector{4, 8, 4}, std::vector{8, 8}})
    for (const DeviceType device : {DeviceType::cpu, DeviceType::cuda})
      CHECK(complaints(result, whole, device, Exit::ok).empty());
  const std::string refused = complaints(result, {4, 6, 6}, DeviceType::cuda, Exit::config);
  CHECK(contains(refused, "error: distributed.tensor_parallel_size is 4, but node node1 has 6 ranks"));
  CHECK(contains(refused, "ranks 8, 9, 10, 11 spans nodes"));
  CHECK(contains(complaints(result, {4, 6, 6}, DeviceType::cpu, Exit::ok), "warning: "));
  // An NVLink domain may have several nodes.
  const ConfigResult domains = config_of({.tp = 8}, {"cluster.segment_size=2"});
  CHECK(complaints(domains, {4, 4, 4, 4}, DeviceType::cuda, Exit::ok).empty());
  CHECK(contains(complaints(domains, {4, 8, 8, 4}, DeviceType::cuda, Exit::config),
                 "NVLink domain node0+node1 has 12 ranks"));
}

TEST_CASE("ranks share the nodes of the configuration", "[plan]") {
  CHECK(plan::local_sizes(config_of({}).config, 4) == std::vector{4, 4, 4, 4});
  CHECK(plan::local_sizes(config_of({}, {"cluster.gpus_per_node=2"}).config, 4) == std::vector{2, 2, 2, 2});
  CHECK(plan::local_sizes(config_of({}, {"cluster.num_nodes=4"}).config, 4) == std::vector{1, 1, 1, 1});
  CHECK(plan::local_sizes(config_of({}, {"cluster.gpus_per_node=[1,3]"}).config, 4) ==
        std::vector{1, 3, 3, 3});
}

TEST_CASE("expert groups stay inside NVLink domains", "[plan]") {
  const ConfigResult result = config_of({.ep = 8}, {"cluster.segment_size=2"});
  CHECK(complaints(result, {4, 4, 4, 4}, DeviceType::cuda, Exit::ok).empty());
  CHECK(
      contains(complaints(result, {2, 2, 2, 2}, DeviceType::cuda, Exit::config),
               "cluster.segment_size is 2, but the expert group of ranks 0, 1, ..., 7 spans NVLink domains"));
}

TEST_CASE("groups that fit into a node and lie on several are named", "[plan]") {
  const ConfigResult experts = config_of({.ep = 4}), context = config_of({.cp = 4});
  CHECK(contains(complaints(experts, {6, 6}, DeviceType::cuda, Exit::ok),
                 "warning: distributed.expert_parallel_size: 1 of 3 groups etp-ep"));
  CHECK(contains(complaints(context, {6, 6}, DeviceType::cuda, Exit::ok),
                 "warning: distributed.context_parallel_size: 1 of 3 groups"));
  // Larger than a node: there is no better place.
  CHECK(complaints(context, {2, 2, 2, 2}, DeviceType::cuda, Exit::ok).empty());
}

TEST_CASE("the section cluster describes the nodes of a plan", "[plan]") {
  const auto nodes = [](const Sizes& sizes, std::vector<std::string> overrides, int world) {
    return plan::nodes_line(plan::configured_nodes(config_of(sizes, std::move(overrides)).config, world));
  };
  CHECK(nodes({}, {}, 8).empty());
  CHECK(nodes({}, {"cluster.gpus_per_node=4"}, 8) == "4 x node0, 4 x node1");
  CHECK(nodes({}, {"cluster.num_nodes=4"}, 8) == "2 x node0, 2 x node1, 2 x node2, 2 x node3");
  CHECK(nodes({}, {"cluster.gpus_per_node=[2,6]"}, 8) == "2 x node0, 6 x node1");
  CHECK(nodes({}, {"cluster.gpus_per_node=1"}, 10) ==
        "1 x node0, 1 x node1, 1 x node2, 1 x node3, 1 x node4, 1 x node5, 1 x node6, 1 x node7, ... (10 "
        "nodes)");
  // In the order in which they take ranks, unless NVLink domains depend on it.
  CHECK(nodes({.tp = 8}, {"cluster.gpus_per_node=[4,8,4]"}, 16) == "8 x node1, 4 x node0, 4 x node2");
  CHECK(nodes({.tp = 8}, {"cluster.gpus_per_node=[4,8,4,8]", "cluster.segment_size=2"}, 24) ==
        "4 x node0, 8 x node1, 4 x node2, 8 x node3");
}
