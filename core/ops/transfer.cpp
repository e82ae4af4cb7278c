#include "core/ops/transfer.h"

#include <cstring>

#include "core/device/runtime.h"
#include "core/ops/cost.h"
#include "core/ops/traced.h"

namespace nrl::ops {

void upload(Exec& exec, const Tensor& to, const void* from) {
  NRL_CHECK(to.contiguous());
  if (exec.needed) return;
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
  NRL_CHECK(!exec.needed && from.contiguous());
  const auto bytes = static_cast<size_t>(from.bytes());
  if (bytes == 0) return;
  if (!exec.device) {
    std::memcpy(to, from.data, bytes);
    return;
  }
  exec.device->copy(to, from.data, bytes, device::CopyKind::device_to_host, exec.stream);
  exec.device->synchronize(exec.stream);
}

void copy(Exec& exec, const Tensor& from, const Tensor& to) {
  const Cost cost{.read = bytes_of(from), .written = bytes_of(to)};
  if (exec.needed) return note_call(exec, "copy", cost);  // needs no kernel
  NRL_CHECK(from.rank == 2 && to.rank == 2 && from.dtype == to.dtype && from.shape == to.shape &&
                from.step(1) == 1 && to.step(1) == 1,
            "copy: from {} to {}", describe(from), describe(to));
  const int64_t size = size_of(from.dtype), rows = from.dim(0);
  const auto bytes = static_cast<size_t>(from.dim(1) * size);
  if (rows == 0 || bytes == 0) return;
  const trace::Range range = traced("copy", cost);
  if (exec.device) {
    if (rows == 1 || (from.contiguous() && to.contiguous()))
      exec.device->copy(to.data, from.data, bytes * static_cast<size_t>(rows),
                        device::CopyKind::device_to_device, exec.stream);
    else
      exec.device->copy_rows(to.data, to.step(0) * size, from.data, from.step(0) * size, bytes, rows,
                             exec.stream);
    return;
  }
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(static_cast<char*>(to.data) + r * to.step(0) * size,
                static_cast<const char*>(from.data) + r * from.step(0) * size, bytes);
}

void synchronize(Exec& exec) {
  if (exec.device) exec.device->synchronize(exec.stream);
}

}  // namespace nrl::ops
