#include "core/ops/transfer.h"

#include <cstring>

#include "core/device/runtime.h"

namespace nrl::ops {

void upload(Exec& exec, const Tensor& to, const void* from) {
  NRL_CHECK(to.contiguous());
  const auto bytes = static_cast<size_t>(to.bytes());
  if (bytes == 0) return;
  if (!exec.device) {
    std::memcpy(to.data, from, bytes);
    return;
  }
  exec.device->copy(to.data, from, bytes, device::CopyKind::host_to_device, exec.stream);
  exec.device->synchronize(exec.stream);
}

void download(Exec& exec, const Tensor& from, void* to) {
  NRL_CHECK(from.contiguous());
  const auto bytes = static_cast<size_t>(from.bytes());
  if (bytes == 0) return;
  if (!exec.device) {
    std::memcpy(to, from.data, bytes);
    return;
  }
  exec.device->copy(to, from.data, bytes, device::CopyKind::device_to_host, exec.stream);
  exec.device->synchronize(exec.stream);
}

void synchronize(Exec& exec) {
  if (exec.device) exec.device->synchronize(exec.stream);
}

}  // namespace nrl::ops
