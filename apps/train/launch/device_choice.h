#pragma once
// Chooses the device and the number of CPU threads of a rank.

#include <string>
#include <string_view>

#include "core/config/config.h"
#include "core/tensor/tensor.h"

namespace nrl::train {

struct DeviceChoice {
  DeviceType type = DeviceType::cpu;
  std::string why_no_gpu;  ///< why no GPU is usable; empty if one is, or if the request is for the CPU
  size_t memory = 0;       ///< bytes of the smallest visible GPU; 0: none is visible, or for the CPU
};
/// The device for a request; for auto a GPU if this process can use one.
DeviceChoice choose_device(DeviceKind requested);

/// The same for a command's option --device ("auto", "cpu" or "cuda"). Fails (69) for "cuda" if this process
/// cannot use a GPU.
DeviceType device_of_option(std::string_view option);

/// The bytes of memory that policy.recompute: auto counts with (plan::make_run_plan). Of a GPU: `memory`, or
/// 0 if ranks may share it; on a CPU the equal share of this machine's among `local` ranks.
size_t memory_for_rank(const KernelsConfig& config, DeviceType device, size_t memory, int local = 1);

/// CPU threads of a rank: kernels.num_threads; for auto OMP_NUM_THREADS, else the cores of its affinity mask
/// divided by the ranks that share them.
int threads_for(const KernelsConfig& config, int local_size);

}  // namespace nrl::train
