// The GPU of nrl-train-sim. NRL_SIM_DEVICES: how many there are; NRL_SIM_MEMORY: MiB that each claims to
// have; NRL_SIM_SEED: order in which streams advance.

#include <cstdlib>

#include "apps/train/launch/accelerator.h"
#include "tests/sim/ops.h"
#include "tests/sim/sim.h"

namespace nrl::train {
namespace {

int setting(const char* name, int fallback) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : fallback;
}

device::SimOptions sim_options() {
  device::SimOptions options;
  options.seed = static_cast<uint64_t>(setting("NRL_SIM_SEED", 1));
  if (const int mebibytes = setting("NRL_SIM_MEMORY", 0); mebibytes > 0)
    options.memory = static_cast<size_t>(mebibytes) << 20;
  return options;
}

std::vector<VisibleDevice> devices(std::string& why_not) {
  std::vector<VisibleDevice> visible;
  for (int i = 0; i < setting("NRL_SIM_DEVICES", 8); ++i)
    visible.push_back({"simulated-" + std::to_string(i), sim_options().memory});
  if (visible.empty()) why_not = "NRL_SIM_DEVICES is 0";
  return visible;
}

std::unique_ptr<device::Runtime> open(int) {
  return device::open_sim(sim_options());
}

}  // namespace

const AcceleratorBackend& accelerator_backend() {
  static const AcceleratorBackend backend{devices, open, ops::sim_kernels, ops::open_sim_libraries};
  return backend;
}

}  // namespace nrl::train
