#include "memory/host_copies.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/base/error.h"
#include "core/device/cpu/parallel.h"

namespace nrl::memory {

using device::CopyKind;

HostCopyStatistics& HostCopyStatistics::operator+=(const HostCopyStatistics& o) {
  for (const auto& [sum, more] : {std::pair{&to_host, &o.to_host}, {&from_host, &o.from_host}}) {
    sum->bytes += more->bytes;
    sum->seconds += more->seconds;
  }
  exposed_seconds += o.exposed_seconds;
  return *this;
}

HostCopies::HostCopies(device::Runtime* device, device::StreamHandle compute, int threads,
                       const Arenas& arenas)
    : device_(device), arenas_(&arenas), compute_(compute), threads_(threads) {}

HostCopies::Ticket HostCopies::unused() {
  if (!unused_.empty()) {
    const Ticket ticket = unused_.back();
    unused_.pop_back();
    return ticket;
  }
  Pending& more = pending_.emplace_back();
  if (device_) {
    more.ready = device::Event(*device_);
    for (device::Event* event : {&more.begin, &more.end, &more.waited})
      *event = device::Event(*device_, device::EventKind::timed);
  }
  return static_cast<Ticket>(pending_.size()) - 1;
}

HostCopies::Ticket HostCopies::start(std::span<const HostCopy> copies, CopyKind kind) {
  if (observer_) {
    int64_t bytes = 0;
    for (const HostCopy& c : copies) bytes += static_cast<int64_t>(c.bytes);
    return observer_->start(kind == CopyKind::device_to_host ? HostWork::to_host : HostWork::from_host,
                            bytes);
  }
  const Ticket ticket = unused();
  Pending& p = pending_[ticket];
  p.used = true;
  p.to_host = kind == CopyKind::device_to_host;
  HostCopyStatistics& copied = current().copied;
  for (const HostCopy& c : copies)
    (p.to_host ? copied.to_host : copied.from_host).bytes += static_cast<int64_t>(c.bytes);
  if (device_) {
    device::Stream& stream = p.to_host ? to_host_ : from_host_;
    if (!stream.get()) stream = device::Stream(*device_);
    p.captured = device_->capturing(compute_);
    p.ready.record(compute_);
    p.ready.wait_in(stream.get());
    if (!p.captured) p.begin.record(stream.get());
    for (const HostCopy& c : copies) device_->copy(c.to, c.from, c.bytes, kind, stream.get());
    p.end.record(stream.get());
  } else if (p.to_host) {
    copy(copies, kind);
  } else {
    for (const HostCopy& c : copies) arenas_->prefetch(c.from, static_cast<int64_t>(c.bytes));
    p.late.assign(copies.begin(), copies.end());
  }
  return ticket;
}

void HostCopies::finish(Ticket ticket) {
  if (observer_) return observer_->wait(ticket);
  Pending& p = pending_.at(static_cast<size_t>(ticket));
  NRL_CHECK(p.used, "copies are finished twice");
  p.used = false;
  if (device_) {
    if (!p.captured) p.waited.record(compute_);
    p.end.wait_in(compute_);
  } else {
    copy(p.late, CopyKind::host_to_device);
    p.late.clear();
  }
  (device_ && !p.captured ? current().timed : unused_).push_back(ticket);
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
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  HostCopyStatistics& copied = current().copied;
  (kind == CopyKind::device_to_host ? copied.to_host : copied.from_host).seconds += seconds;
  copied.exposed_seconds += seconds;
}

void HostCopies::end_step() {
  HostCopyStatistics& copied = current().copied;
  if (copied.bytes() == 0) {
    copied.to_host.bytes = last_.to_host.bytes;
    copied.from_host.bytes = last_.from_host.bytes;
  }
  last_ = copied;
  ++ended_;
  NRL_CHECK(ended_ - collected_ < max_steps, "the copies of {} steps were not collected", max_steps);
}

HostCopyStatistics HostCopies::collect() {
  NRL_CHECK(collected_ < ended_, "no step has ended");
  Step& step = steps_[collected_++ % max_steps];
  HostCopyStatistics copied = std::exchange(step.copied, {});
  for (const Ticket ticket : step.timed) {
    const Pending& p = pending_[ticket];
    const auto seconds = [&](const device::Event& from) {
      return std::max(device_->elapsed_ms(from.get(), p.end.get()), 0.0) * 1e-3;
    };
    (p.to_host ? copied.to_host : copied.from_host).seconds += seconds(p.begin);
    copied.exposed_seconds += seconds(p.waited);
    unused_.push_back(ticket);
  }
  step.timed.clear();
  return copied;
}

}  // namespace nrl::memory
