// The GPU of nrl-train-sim. NRL_SIM_DEVICES: how many there are; NRL_SIM_SEED: order in
// which streams advance.

#include <cstdlib>

#include "apps/train/accelerator.h"
#include "core/device/sim/sim.h"

namespace nrl::train {
namespace {

int setting(const char* name, int fallback) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : fallback;
}

std::vector<std::string> devices(std::string& why_not) {
  std::vector<std::string> ids;
  for (int i = 0; i < setting("NRL_SIM_DEVICES", 8); ++i) ids.push_back("simulated-" + std::to_string(i));
  if (ids.empty()) why_not = "NRL_SIM_DEVICES is 0";
  return ids;
}

std::unique_ptr<device::Runtime> open(int) {
  device::SimOptions options;
  options.seed = static_cast<uint64_t>(setting("NRL_SIM_SEED", 1));
  return device::open_sim(options);
}

}  // namespace

const AcceleratorBackend& accelerator_backend() {
  static const AcceleratorBackend backend{devices, open, ops::sim_kernels, ops::open_sim_libraries};
  return backend;
}

}  // namespace nrl::train
