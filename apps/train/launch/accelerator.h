#pragma once
// The GPU of a rank. accelerator_backend() is defined by accelerator_cuda.cpp, or in tests for
// the simulated device.

#include <memory>
#include <string>
#include <vector>

#include "core/device/runtime.h"
#include "core/ops/kernel_table.h"
#include "core/ops/libraries.h"

namespace nrl::train {

struct VisibleDevice {
  std::string uuid;
  size_t memory = 0;  ///< bytes
};

struct AcceleratorBackend {
  /// The devices visible to this process; if there are none, `why_not` is set to the reason.
  std::vector<VisibleDevice> (*devices)(std::string& why_not) = nullptr;
  std::unique_ptr<device::Runtime> (*open)(int ordinal) = nullptr;
  const ops::KernelTable& (*kernels)() = nullptr;
  std::unique_ptr<ops::Libraries> (*libraries)(device::Runtime& runtime,
                                               const ops::LibraryOptions& options) = nullptr;
};
const AcceleratorBackend& accelerator_backend();

/// An open device with its libraries and compute stream. Must outlive everything that uses it.
struct Accelerator {
  std::unique_ptr<device::Runtime> runtime;
  std::unique_ptr<ops::Libraries> libraries;
  device::Stream compute;
  double context_seconds = 0, library_seconds = 0;  ///< of opening them

  /// An Exec on the compute stream without workspace.
  ops::Exec exec() const;
};
Accelerator open_accelerator(int ordinal, const ops::LibraryOptions& options);

}  // namespace nrl::train
