#pragma once
// Dry runs: ops that compute nothing and note what they would call, on a device that need not exist.

#include <memory>
#include <vector>

#include "core/device/runtime.h"
#include "core/ops/cost.h"
#include "core/ops/kernel_table.h"
#include "core/ops/libraries.h"

namespace nrl::ops {

/// A device without memory and kernels, for dry runs.
class DryDevice {
 public:
  /// A CPU with `threads` threads per rank. `products`: KernelTable::bf16_products of its kernels.
  explicit DryDevice(int threads, Bf16Products products = Bf16Products::upcast);
  /// A GPU whose ranks have `threads` threads each on the host.
  DryDevice(const device::Properties& gpu, const LibraryOptions& options, int threads = 1);
  /// A device for which ops need as much workspace as for the one of `exec`.
  static DryDevice like(const Exec& exec);

  ~DryDevice();
  DryDevice(DryDevice&&) noexcept;
  DryDevice& operator=(DryDevice&&) noexcept;

  const Exec& exec() const { return exec_; }
  DeviceType type() const { return runtime_ ? DeviceType::cuda : DeviceType::cpu; }

 private:
  std::unique_ptr<device::Runtime> runtime_;
  std::unique_ptr<Libraries> libraries_;
  std::unique_ptr<KernelTable> no_kernels_;
  Exec exec_;
};

/// While it lives, the ops of an execution context compute nothing (Exec::needed).
class DryRun {
 public:
  /// `calls`: gets the ops' calls with their costs, in order, if it is not null.
  explicit DryRun(Exec& exec, std::vector<Call>* calls = nullptr);
  ~DryRun();
  DryRun(const DryRun&) = delete;
  DryRun& operator=(const DryRun&) = delete;

  const KernelSet& kernels() const { return kernels_; }
  /// The bytes of Exec::workspace that the ops need: the workspace() of the largest call.
  size_t workspace() const { return workspace_; }

 private:
  Exec& exec_;
  KernelSet kernels_;
  size_t workspace_ = 0;
};

}  // namespace nrl::ops
