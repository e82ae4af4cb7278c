#include "apps/plan/dry_device.h"

#include "core/device/dry_run.h"
#include "core/ops/kernel_table.h"

namespace nrl::plan {

DryDevice::DryDevice(int threads) : no_kernels_(std::make_unique<ops::KernelTable>()) {
  exec_.kernels = no_kernels_.get();
  exec_.threads = threads;
}

DryDevice::DryDevice(const device::Properties& gpu, const ops::LibraryOptions& options, int threads)
    : DryDevice(threads) {
  runtime_ = device::open_dry_run(gpu);
  libraries_ = ops::open_dry_run_libraries(gpu.major, options);
  exec_.reduction_blocks = ops::gpu_partials;
  exec_.device = runtime_.get();
  exec_.multiprocessors = gpu.multiprocessors;
  exec_.libraries = libraries_.get();
}

DryDevice::~DryDevice() = default;
DryDevice::DryDevice(DryDevice&&) noexcept = default;
DryDevice& DryDevice::operator=(DryDevice&&) noexcept = default;

DryDevice DryDevice::usual(DeviceType type, int threads, const precision::Recipe& recipe) {
  if (type == DeviceType::cpu) return DryDevice(threads);
  const precision::QuantizedGemms& q = recipe.quantized();
  const bool newer = q.attention || q.weight.scaling == Scaling::mx32;
  device::Properties properties;
  properties.name = newer ? "B200" : "H100";
  properties.major = newer ? 10 : 9;
  properties.multiprocessors = ops::gpu_multiprocessors;
  properties.memory = size_t{1} << 50;
  return {properties, {}, threads};
}

}  // namespace nrl::plan
