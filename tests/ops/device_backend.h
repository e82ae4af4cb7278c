#pragma once
// Backends whose kernels run on a device with memory of its own: CUDA, and the simulated device.

#include "tests/ops/backend.h"

namespace nrl::ops_test {

/// A backend on `device`. Buffers get memory on both sides: tensors hold host addresses, and each kernel of
/// the backend's table is called with the device's. Before it, all live Buffers are copied to the device;
/// behind it, back, all of it on `stream`, which is kept busy meanwhile, so that kernels are enqueued before
/// earlier work has run. Must be called before the first Buffer is made; all calls must be for the same
/// device and stream. Errors of a kernel surface in its call. (CUDA_LAUNCH_BLOCKING=1 tells which launch
/// failed.)
Backend device_backend(std::string name, std::shared_ptr<device::Runtime> device,
                       std::shared_ptr<device::Stream> stream, const ops::KernelTable& kernels,
                       std::shared_ptr<ops::Libraries> libraries);

}  // namespace nrl::ops_test
