#pragma once
// Which device a rank takes, and with how many threads, from the configuration and this machine.

#include <string>
#include <string_view>

#include "core/config/config.h"
#include "core/tensor/tensor.h"

namespace nrl::train {

struct DeviceChoice {
  DeviceType type = DeviceType::cpu;
  std::string why_no_gpu;  ///< why this process cannot use one; empty where it can or was not to look
};
/// What `device` asks for; for auto a GPU where this process sees one.
DeviceChoice choose_device(DeviceKind wanted);

/// The same for the option --device of a command: "auto", "cpu" or "cuda". Fails (69) when a GPU is demanded
/// and this process can use none.
DeviceType device_of_option(std::string_view option);

/// Threads of a rank: kernels.num_threads; for auto OMP_NUM_THREADS, or the processor's share of this rank:
/// cores of its affinity mask over the ranks that share them.
int threads_for(const KernelsConfig& config, int local_size);

}  // namespace nrl::train
