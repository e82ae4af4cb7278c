#pragma once
// Private to make_device: device memory through NCCL. Implemented by nccl_comm.cpp, or by no_nccl.cpp in
// builds without NCCL.

#include <memory>

#include "core/device/runtime.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/device_options.h"

namespace nrl::comm {

/// Collective over `host`, which has several ranks; `host` and `device` must outlive it.
/// `device` must be a CUDA device.
std::unique_ptr<Communicator> make_nccl(Communicator& host, device::Runtime& device,
                                        const DeviceCommOptions& options);

/// ncclMemAlloc and ncclMemFree, on the device that is current.
device::Allocator nccl_allocator();

}  // namespace nrl::comm
