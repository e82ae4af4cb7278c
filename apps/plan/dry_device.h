#pragma once
// Replaces the machine in a dry run: a device that computes nothing, and groups of ranks that do not exist.

#include <memory>

#include "core/device/runtime.h"
#include "core/ops/exec.h"
#include "core/ops/libraries.h"
#include "core/tensor/tensor.h"
#include "precision/recipe.h"

namespace nrl::plan {

/// A device that computes nothing: its ops record the kernels that they would call (ops::Exec::needed).
class DryDevice {
 public:
  /// A CPU with `threads` threads per rank.
  explicit DryDevice(int threads);
  /// A GPU whose ranks have `threads` threads each on the host.
  DryDevice(const device::Properties& gpu, const ops::LibraryOptions& options, int threads = 1);
  /// A CPU with `threads` threads per rank, or a GPU that runs `recipe`: a B200 for attention with FP8
  /// operands and for MXFP8, else an H100.
  static DryDevice usual(DeviceType type, int threads, const precision::Recipe& recipe);

  ~DryDevice();
  DryDevice(DryDevice&&) noexcept;
  DryDevice& operator=(DryDevice&&) noexcept;

  const ops::Exec& exec() const { return exec_; }
  DeviceType type() const { return runtime_ ? DeviceType::cuda : DeviceType::cpu; }

 private:
  std::unique_ptr<device::Runtime> runtime_;
  std::unique_ptr<ops::Libraries> libraries_;
  std::unique_ptr<ops::KernelTable> no_kernels_;
  ops::Exec exec_;
};

}  // namespace nrl::plan
