#include "core/device/dry_run.h"
#include "core/ops/dry_run.h"
#include "core/trace/trace.h"

namespace nrl::ops {

DryDevice::DryDevice(int threads, Bf16Products products) : no_kernels_(std::make_unique<KernelTable>()) {
  no_kernels_->bf16_products = products;
  exec_.kernels = no_kernels_.get();
  exec_.threads = threads;
}

DryDevice::DryDevice(const device::Properties& gpu, const LibraryOptions& options, int threads)
    : DryDevice(threads) {
  runtime_ = device::open_dry_run(gpu);
  libraries_ = open_dry_run_libraries(gpu.major, options);
  exec_.reduction_blocks = gpu_partials;
  exec_.device = runtime_.get();
  exec_.multiprocessors = gpu.multiprocessors;
  exec_.libraries = libraries_.get();
}

DryDevice DryDevice::like(const Exec& exec) {
  if (!exec.on_gpu()) return DryDevice(exec.threads, exec.kernels->bf16_products);
  device::Properties properties;
  properties.major = 9;
  if (exec.device) properties = exec.device->properties();
  DryDevice device(properties, {}, exec.threads);
  device.exec_.reduction_blocks = exec.reduction_blocks;
  return device;
}

DryDevice::~DryDevice() = default;
DryDevice::DryDevice(DryDevice&&) noexcept = default;
DryDevice& DryDevice::operator=(DryDevice&&) noexcept = default;

DryRun::DryRun(Exec& exec, std::vector<Call>* calls) : exec_(exec) {
  exec.needed = &kernels_;
  exec.scratch = &workspace_;
  exec.calls = calls;
  trace::track_nesting(calls != nullptr);
}

DryRun::~DryRun() {
  trace::track_nesting(false);
  exec_.needed = nullptr;
  exec_.scratch = nullptr;
  exec_.calls = nullptr;
}

}  // namespace nrl::ops
