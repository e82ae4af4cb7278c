#include "parallel/comm/staged/staging.h"

#include <algorithm>
#include <bit>
#include <exception>

#include "core/base/error.h"

namespace nrl::comm {

void CopyStreams::to_host(void* host, const void* device, int64_t bytes) const {
  if (bytes > 0)
    runtime_.copy(host, device, static_cast<size_t>(bytes), device::CopyKind::device_to_host, out_.get());
}

void CopyStreams::to_device(void* device, const void* host, int64_t bytes) const {
  if (bytes > 0)
    runtime_.copy(device, host, static_cast<size_t>(bytes), device::CopyKind::host_to_device, in_.get());
}

void CopyStreams::drain() const noexcept {
  for (const device::Stream* stream : {&out_, &in_}) {
    try {
      stream->synchronize();
    } catch (const std::exception&) {  // the device has failed and has been reported
    }
  }
}

Staging::Staging(device::Runtime& runtime, int64_t slot_bytes, int slots)
    : slot_bytes_(slot_bytes), copies_(runtime) {
  NRL_CHECK(slots >= 2, "staging in {} slots", slots);
  for (int i = 0; i < slots; ++i)
    slots_.push_back({device::Memory(runtime, device::Memory::Kind::pinned, static_cast<size_t>(slot_bytes)),
                      device::Event(runtime), device::Event(runtime)});
}

Task Staging::pipeline(int64_t chunks, Copies out, Exchange exchange, Copies in) {
  const auto slot = [&](int64_t k) -> Slot& {
    return slots_[(next_ + static_cast<size_t>(k)) % slots_.size()];
  };
  const auto fill = [&](int64_t k) {
    Slot& s = slot(k);
    if (s.used) s.emptied.wait_in(copies_.out());
    out(k, s.memory.data());
    s.filled.record(copies_.out());
  };
  if (chunks > 0) fill(0);
  for (int64_t k = 0; k < chunks; ++k) {
    if (k + 1 < chunks) fill(k + 1);
    Slot& s = slot(k);
    // Needed even if nothing was copied: the slot's previous use must have completed.
    co_await until([&] { return s.filled.done(); });
    co_await exchange(k, s.memory.data());
    in(k, s.memory.data());
    s.emptied.record(copies_.in());
    s.used = true;
  }
  next_ = (next_ + static_cast<size_t>(chunks)) % slots_.size();
}

std::unique_ptr<MessageStaging::Buffer> MessageStaging::take(int64_t bytes) {
  const auto wanted = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const Buffer& b = **it;
    if (b.memory.size() < wanted || (best != free_.end() && b.memory.size() >= (*best)->memory.size()))
      continue;
    if (!b.used || b.free.done()) best = it;
  }
  if (best == free_.end()) {
    const size_t size = std::bit_ceil(std::max<size_t>(wanted, 64 * 1024));
    return std::make_unique<Buffer>(
        Buffer{device::Memory(runtime_, device::Memory::Kind::pinned, size), device::Event(runtime_), false});
  }
  std::unique_ptr<Buffer> out = std::move(*best);
  free_.erase(best);
  return out;
}

void MessageStaging::give(std::unique_ptr<Buffer> buffer, bool to_device) {
  if (to_device) buffer->free.record(copies_.in());
  buffer->used = to_device;
  free_.push_back(std::move(buffer));
}

}  // namespace nrl::comm
