#include "memory/host_copies.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/base/error.h"
#include "core/device/cpu/parallel.h"

namespace nrl::memory {

using device::CopyKind;

HostCopies::HostCopies(device::Runtime* device, device::StreamHandle compute, int threads,
                       const Arenas& arenas)
    : device_(device), arenas_(&arenas), compute_(compute), threads_(threads) {}

std::vector<HostCopies::Pending>::iterator HostCopies::unused() {
  const auto free = std::find_if(pending_.begin(), pending_.end(), [](const Pending& p) { return !p.used; });
  if (free != pending_.end()) return free;
  Pending more;
  if (device_) {
    more.begin = device::Event(*device_);
    more.end = device::Event(*device_);
  }
  pending_.push_back(std::move(more));
  return pending_.end() - 1;
}

HostCopies::Ticket HostCopies::start(std::span<const HostCopy> copies, CopyKind kind) {
  const auto free = unused();
  free->used = true;
  int64_t& bytes = kind == CopyKind::device_to_host ? statistics_.to_host : statistics_.from_host;
  for (const HostCopy& c : copies) bytes += static_cast<int64_t>(c.bytes);
  if (device_) {
    device::Stream& stream = kind == CopyKind::device_to_host ? to_host_ : from_host_;
    if (!stream.get()) stream = device::Stream(*device_);
    free->begin.record(compute_);
    free->begin.wait_in(stream.get());
    for (const HostCopy& c : copies) device_->copy(c.to, c.from, c.bytes, kind, stream.get());
    free->end.record(stream.get());
  } else if (kind == CopyKind::device_to_host) {
    copy(copies, kind);
  } else {
    for (const HostCopy& c : copies) arenas_->prefetch(c.from, static_cast<int64_t>(c.bytes));
    free->late.assign(copies.begin(), copies.end());
  }
  return static_cast<Ticket>(free - pending_.begin());
}

void HostCopies::finish(Ticket ticket) {
  Pending& p = pending_.at(static_cast<size_t>(ticket));
  NRL_CHECK(p.used, "copies are finished twice");
  p.used = false;
  if (device_) return p.end.wait_in(compute_);
  copy(p.late, CopyKind::host_to_device);
  p.late.clear();
}

void HostCopies::copy(std::span<const HostCopy> copies, CopyKind kind) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  constexpr int64_t grain = 1 << 18, piece = 4 << 20;  // of the file, a piece is resident at a time
  for (const HostCopy& c : copies)
    for (int64_t at = 0; at < static_cast<int64_t>(c.bytes); at += piece) {
      auto* const to = static_cast<std::byte*>(c.to) + at;
      const auto* const from = static_cast<const std::byte*>(c.from) + at;
      const int64_t bytes = std::min(piece, static_cast<int64_t>(c.bytes) - at);
      cpu::parallel_for(threads_, bytes, grain, [&](int64_t first, int64_t last) {
        std::memcpy(to + first, from + first, static_cast<size_t>(last - first));
      });
      arenas_->evict(kind == CopyKind::device_to_host ? to : from, bytes);
    }
  statistics_.seconds += std::chrono::duration<double>(Clock::now() - begin).count();
}

HostCopyStatistics HostCopies::take_statistics() {
  return std::exchange(statistics_, {});
}

}  // namespace nrl::memory
