#include "apps/train/accelerator.h"

#include "apps/train/report/timers.h"

namespace nrl::train {

ops::Exec Accelerator::exec() const {
  ops::Exec exec;
  exec.kernels = &accelerator_backend().kernels();
  exec.reduction_blocks = ops::gpu_partials;
  exec.stream = compute.get();
  exec.device = runtime.get();
  exec.multiprocessors = runtime->properties().multiprocessors;
  exec.libraries = libraries.get();
  return exec;
}

Accelerator open_accelerator(int ordinal, const ops::LibraryOptions& options) {
  const AcceleratorBackend& backend = accelerator_backend();
  Accelerator a;
  const double begin = Timers::steady_seconds();
  a.runtime = backend.open(ordinal);
  a.runtime->bind_thread();
  const double opened = Timers::steady_seconds();
  a.libraries = backend.libraries(*a.runtime, options);
  a.context_seconds = opened - begin;
  a.library_seconds = Timers::steady_seconds() - opened;
  a.compute = device::Stream(*a.runtime);
  return a;
}

double peak_flops(const device::Properties& device) {
  // From data sheets, without sparsity. A name must precede its own prefixes.
  static constexpr struct {
    const char* name;
    double teraflops;
  } sheet[] = {{"GB300", 2500}, {"GB200", 2500}, {"B300", 2250}, {"B200", 2250},     {"GH200", 989},
               {"H200", 989},   {"H20", 148},    {"H800", 989},  {"H100 PCIe", 756}, {"H100 NVL", 835},
               {"H100", 989},   {"A100", 312},   {"A800", 312}};
  for (const auto& entry : sheet)
    if (device.name.find(entry.name) != std::string::npos) return entry.teraflops * 1e12;
  return 0;
}

}  // namespace nrl::train
