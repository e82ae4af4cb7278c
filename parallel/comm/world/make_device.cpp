#include "parallel/comm/world/make_device.h"

#include "core/base/error.h"
#include "parallel/comm/nccl/nccl_comm.h"
#include "parallel/comm/self/self_comm.h"
#include "parallel/comm/staged/staged_comm.h"

namespace nrl::comm {

std::unique_ptr<Communicator> make_device_communicator(DeviceCommKind kind, Communicator& host,
                                                       device::Runtime& device,
                                                       const DeviceCommOptions& options) {
  NRL_CHECK(&host.host() == &host, "{} is a communicator of device memory already", host.label());
  if (host.size() == 1) return make_device_self(host, device);
  NRL_CHECK(host.host_transport(), "{} cannot carry communication of device memory", host.label());
  return kind == DeviceCommKind::nccl ? make_nccl(host, device, options) : make_staged(host, device, options);
}

device::Allocator device_allocator(DeviceCommKind kind) {
  return kind == DeviceCommKind::nccl ? nccl_allocator() : device::Allocator();
}

}  // namespace nrl::comm
