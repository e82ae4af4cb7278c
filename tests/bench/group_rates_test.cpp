#include "apps/bench/group_rates.h"

#include "tests/catch.h"

using namespace nrl;
using bench::GroupKind;

TEST_CASE("slow groups of a kind are named with their hosts") {
  const std::vector<int> nodes{0, 0, 1, 1, 2, 2, 3, 3};
  const std::vector<std::string> hosts{"a", "a", "b", "b", "c", "c", "d", "d"};
  const GroupKind inside("tp", {{0, 1}, {2, 3}, {4, 5}, {6, 7}}, nodes);
  CHECK(inside.heading() == "tp: 4 groups of 2 ranks, inside a node");
  CHECK(inside.remarks({10e9, 9e9, 11e9, 8.1e9}, hosts, nullptr) == "");
  CHECK(inside.remarks({10e9, 4e9, 11e9, 10e9}, hosts, nullptr) ==
        "slow: ranks 2, 3 (b): all_reduce reaches 40 % of the median group\n");
  const GroupKind across("", {{0, 2, 4, 6}, {1, 3, 5, 7}}, nodes);
  CHECK(across.heading() == "2 groups of 4 ranks, across 4 nodes");
  CHECK(across.remarks({10e9, 30e9}, hosts, nullptr) ==
        "slow: ranks 0, 2, 4, 6 (a, b, c, d): all_reduce reaches 50 % of the median group\n");
  std::vector<std::vector<int>> pairs;
  std::vector<double> rates;
  for (int i = 0; i < 16; ++i) {
    pairs.push_back({2 * i, 2 * i + 1});
    rates.push_back(i < 6 ? 1e9 : 2e9);
  }
  const std::string many =
      GroupKind("dp", pairs, std::vector<int>(32)).remarks(rates, std::vector<std::string>(32, "n"), nullptr);
  CHECK(std::count(many.begin(), many.end(), '\n') == 5);
  CHECK(many.ends_with("and 2 more\n"));
}

TEST_CASE("rates are compared with what is assumed of the GPU's links") {
  const machine::DeviceModel* const h100 = &machine::find_device_model("--device", "h100");
  const GroupKind inside("tp", {{0, 1}}, {0, 0}), across("dp", {{0, 1}}, {0, 1});
  const std::vector<std::string> hosts{"a", "b"};
  CHECK(inside.remarks({185e9}, hosts, h100) ==
        "all_reduce: 185 GB/s on the bus, 50 % of the 370 that are assumed of H100 inside a node\n");
  CHECK(across.remarks({46e9}, hosts, h100) ==
        "all_reduce: 46 GB/s on the bus, 100 % of the 46 that are assumed of H100 across nodes\n");
  device::Properties properties = h100->properties();
  properties.name = "NVIDIA H100 80GB HBM3";
  CHECK(machine::model_of_device(properties) == h100);
  properties.name = "NVIDIA H100 PCIe";
  CHECK(machine::model_of_device(properties)->name == "h100-pcie");
}
