#include "apps/train/launch/device_choice.h"

#include <algorithm>

#include <unistd.h>

#include "apps/train/launch/accelerator.h"
#include "core/base/error.h"
#include "core/device/cpu/memory.h"
#include "core/device/cpu/threads.h"

namespace nrl::train {

DeviceChoice choose_device(DeviceKind requested) {
  if (requested == DeviceKind::cpu) return {};
  DeviceChoice choice;
  const std::vector<VisibleDevice> visible = accelerator_backend().devices(choice.why_no_gpu);
  const bool found = !visible.empty();
  if (found) choice.memory = std::ranges::min_element(visible, {}, &VisibleDevice::memory)->memory;
  if (found) choice.why_no_gpu.clear();
  if (found || requested == DeviceKind::cuda) choice.type = DeviceType::cuda;
  return choice;
}

DeviceType device_of_option(std::string_view option) {
  const auto requested = option == "cuda"  ? DeviceKind::cuda
                         : option == "cpu" ? DeviceKind::cpu
                                           : DeviceKind::automatic;
  const DeviceChoice choice = choose_device(requested);
  if (requested == DeviceKind::cuda && !choice.why_no_gpu.empty())
    fail(Exit::unavailable, "--device cuda: {}. Fix: use --device cpu or auto, or see nrl-train doctor",
         choice.why_no_gpu);
  return choice.type;
}

size_t memory_for_rank(const KernelsConfig& config, DeviceType device, size_t memory, int local) {
  if (device == DeviceType::cpu) return cpu::machine_memory() / static_cast<size_t>(local);
  return config.share_device ? 0 : memory;
}

int threads_for(const KernelsConfig& config, int local_size) {
  if (!config.num_threads.is_auto()) return static_cast<int>(config.num_threads.value());
  if (const int asked = cpu::omp_num_threads().threads; asked > 0) return asked;
  const int mask = cpu::available_cpus(), online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  // A mask that is a rank's share of the machine was set for this rank (mpirun binds to cores); otherwise all
  // local ranks share the mask.
  const int cores = cpu::available_cores();
  return std::max(1, mask * local_size <= online ? cores : cores / local_size);
}

}  // namespace nrl::train
