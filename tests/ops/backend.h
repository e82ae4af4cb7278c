#pragma once
// The backends that the op cases run on.

#include <algorithm>
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
  std::shared_ptr<device::Stream> stream;  ///< null: work runs when it is enqueued
  std::shared_ptr<ops::Libraries> libraries;
  std::shared_ptr<device::Memory> scratch;  ///< workspace on the device; null: in host memory
  bool deterministic = true;                ///< two runs give the same bits
  std::vector<std::string> only;            ///< not empty: runs the cases with one of these in their names
  bool runs(const std::string& name) const {
    return only.empty() || std::any_of(only.begin(), only.end(), [&](const std::string& part) {
             return name.find(part) != std::string::npos;
           });
  }
};

/// A kernel that the backend's table does not have.
struct MissingKernel {
  std::string name;
};

/// The table with MissingKernel thrown where it has no kernel.
ops::KernelTable complete(const ops::KernelTable& table);

/// The kernels of the GPU run on the CPU.
Backend sim_backend();

/// What a test program runs on; each has a program_*.cpp of its own.
struct Program {
  std::vector<Backend> backends;
  std::string skipped;  ///< why there are none
};
Program program();

}  // namespace nrl::ops_test
