#pragma once
// Private to make_device: device memory through pinned host memory over the host communicator.

#include <memory>

#include "core/device/runtime.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/device_options.h"

namespace nrl::comm {

/// Collective over `host`, which has several ranks; `host` and `device` must outlive it.
std::unique_ptr<Communicator> make_staged(Communicator& host, device::Runtime& device,
                                          const DeviceCommOptions& options);

}  // namespace nrl::comm
