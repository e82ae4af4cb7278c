#include "apps/train/report/start_phases.h"

#include <system_error>
#include <utility>

namespace nrl::train {

StartPhases::StartPhases(Print print, std::chrono::milliseconds patience, std::chrono::milliseconds repeat)
    : print_(std::move(print)), patience_(patience), repeat_(repeat) {}

void StartPhases::begin(std::string phase) {
  {
    const std::lock_guard lock(mutex_);
    phase_ = std::move(phase);
    begun_ = Clock::now();
    ended_ = false;
  }
  if (thread_.joinable()) return;
  try {
    thread_ = std::thread([this] { watch(); });
  } catch (const std::system_error&) {
    // Without a thread nothing is printed.
  }
}

void StartPhases::end() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  over_.notify_all();
  thread_.join();
  thread_ = {};
}

void StartPhases::watch() {
  std::unique_lock lock(mutex_);
  std::string printed;
  Clock::time_point printed_at = Clock::now();
  while (!over_.wait_for(lock, patience_, [&] { return ended_; })) {
    const Clock::time_point now = Clock::now();
    if (phase_ == printed && now - printed_at < repeat_) continue;
    print_(phase_, std::chrono::duration<double>(now - begun_).count());
    printed = phase_;
    printed_at = now;
  }
}

}  // namespace nrl::train
