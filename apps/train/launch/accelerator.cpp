#include "apps/train/launch/accelerator.h"

#include "apps/monitor/timers.h"

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
  const double begin = monitor::Timers::steady_seconds();
  a.runtime = backend.open(ordinal);
  a.runtime->bind_thread();
  const double opened = monitor::Timers::steady_seconds();
  a.libraries = backend.libraries(*a.runtime, options);
  a.context_seconds = opened - begin;
  a.library_seconds = monitor::Timers::steady_seconds() - opened;
  a.compute = device::Stream(*a.runtime);
  return a;
}

}  // namespace nrl::train
