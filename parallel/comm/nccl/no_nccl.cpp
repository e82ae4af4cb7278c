#include "core/base/error.h"
#include "parallel/comm/nccl/nccl_comm.h"

namespace nrl::comm {

NcclSupport nccl_support() {
  return {};
}

std::unique_ptr<Communicator> make_nccl(Communicator& host, device::Runtime&, const DeviceCommOptions&) {
  fail(Exit::unavailable,
       "{} cannot use NCCL: this build has none. Fix: set distributed.backend: staged, which goes through "
       "host memory",
       host.label());
}

device::Allocator nccl_allocator() {
  return {};
}

}  // namespace nrl::comm
