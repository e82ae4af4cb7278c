#pragma once
// Ops on the simulated device: the project's kernels on fibers, and GEMMs in host code.

#include <memory>

#include "core/ops/kernel_table.h"
#include "core/ops/libraries.h"

namespace nrl::ops {

/// The GPU's kernels (core/ops/<op>/cuda.cu), compiled for the simulated device.
const KernelTable& sim_kernels();

/// Libraries with GEMMs in host code, which run in stream order, and without attention. Autotuning chooses
/// between two algorithms with different bits.
std::unique_ptr<Libraries> open_sim_libraries(device::Runtime& runtime, const LibraryOptions& options);

}  // namespace nrl::ops
