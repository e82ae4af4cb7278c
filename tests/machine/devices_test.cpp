#include <algorithm>

#include "apps/machine/device_models.h"
#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;
using machine::DeviceModel;

namespace {
constexpr double gib = 1 << 30;
}

TEST_CASE("memory of a GPU is what its driver reports, and some of it is outside a plan", "[machine]") {
  const auto mib = [](const char* name) {
    return machine::find_device_model("--device", name).memory / (1 << 20);
  };
  CHECK(mib("a100") == 81920);
  CHECK(mib("h100") == 81559);
  CHECK(mib("h200") == 143771);
  CHECK(mib("b200") == 182630);
  const DeviceModel& h100 = machine::find_device_model("--device", "h100");
  const auto room = static_cast<double>(h100.for_plan(0));
  CHECK(78 * gib <= room);
  CHECK(79 * gib > room);
  CHECK(h100.outside_plan(6) - h100.outside_plan(2) == gib);
  CHECK(machine::usual_model(DeviceType::cpu, 1, precision::Recipe{}).outside_plan(4) == 0);
}

TEST_CASE("a GPU is found again by its properties, variants by peak and memory", "[machine]") {
  const std::string names = machine::device_model_names() + ", ";
  int count = 0;
  for (size_t at = 0, end = 0; (end = names.find(", ", at)) != std::string::npos; at = end + 2, ++count) {
    const std::string name = names.substr(at, end - at);
    const DeviceModel& m = machine::find_device_model("--device", name);
    INFO(m.name);
    CHECK(machine::model_of_device(m.properties()) == &m);
    CHECK(m.gpu());
    CHECK((m.bf16_flops() > m.tf32_flops && m.tf32_flops > m.f32_flops));
    CHECK((m.idle_power > 0 && m.idle_power < m.power_limit));
    CHECK((m.node.bandwidth > m.network.bandwidth && m.network.bandwidth > 0));
    CHECK(m.node_ranks >= 1);
  }
  CHECK(count == 12);
  device::Properties p = machine::find_device_model("--device", "h100").properties();
  p.name = "NVIDIA H100 PCIe";
  CHECK(machine::model_of_device(p)->name == "h100-pcie");
  p.name = "NVIDIA A100-SXM4-40GB";
  p.memory = size_t{40536} << 20;
  CHECK(machine::model_of_device(p)->name == "a100-40g");
  p.name = "NVIDIA L4";
  CHECK(machine::model_of_device(p) == nullptr);
}
