#pragma once
// The backends that the op cases run on.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/ops/kernel_table.h"
#include "core/ops/libraries.h"

namespace nrl::ops_test {

struct Backend {
  std::string name;
  ops::KernelTable kernels;
  bool gpu =
      false;  ///< CUDA or the simulated device: one run with ops::gpu_partials instead of 1 and 2 threads
  std::shared_ptr<device::Runtime> device;
  std::shared_ptr<ops::Libraries> libraries;
  std::function<void()> finish = [] {};  ///< waits until results can be read
};

/// A kernel that the backend's table does not have.
struct MissingKernel {
  std::string name;
};

/// The table with MissingKernel thrown where it has no kernel.
ops::KernelTable complete(const ops::KernelTable& table);

/// Every instruction set of this processor.
std::vector<Backend> cpu_backends();
/// The kernels of the GPU run on the CPU.
Backend sim_backend();
/// The GPU, if this program is built for one and there is one; otherwise `why_not` says the reason.
std::vector<Backend> cuda_backends(std::string& why_not);

}  // namespace nrl::ops_test
