#pragma once
// A pool of device events, so that issuing an operation creates none.

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/device/runtime.h"

namespace nrl::comm {

/// Thread-safe. Owned by a shared_ptr; every event taken from it keeps the pool alive.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  EventPool(device::Runtime& runtime, device::EventKind kind) : runtime_(runtime), kind_(kind) {}

  /// RAII handle; returns the event to the pool. The event must have completed, or no thread may wait for
  /// it any more.
  class Pooled {
   public:
    Pooled() = default;
    Pooled(std::shared_ptr<EventPool> pool, device::Event event)
        : pool_(std::move(pool)), event_(std::move(event)) {}
    ~Pooled() {
      if (pool_) pool_->put(std::move(event_));
    }
    Pooled(Pooled&& o) noexcept : pool_(std::move(o.pool_)), event_(std::move(o.event_)) {}
    Pooled& operator=(Pooled&& o) noexcept {
      std::swap(pool_, o.pool_);
      std::swap(event_, o.event_);
      return *this;
    }
    explicit operator bool() const { return pool_ != nullptr; }
    const device::Event* operator->() const { return &event_; }
    const device::Event& operator*() const { return event_; }

   private:
    std::shared_ptr<EventPool> pool_;
    device::Event event_;
  };

  Pooled take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        device::Event event = std::move(free_.back());
        free_.pop_back();
        return {shared_from_this(), std::move(event)};
      }
    }
    return {shared_from_this(), device::Event(runtime_, kind_)};
  }

 private:
  void put(device::Event event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(event));
  }

  device::Runtime& runtime_;
  device::EventKind kind_;
  std::mutex mutex_;
  std::vector<device::Event> free_;
};

}  // namespace nrl::comm
