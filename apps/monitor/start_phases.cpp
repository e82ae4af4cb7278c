#include "apps/monitor/start_phases.h"

#include <algorithm>
#include <system_error>

#include <spdlog/fmt/fmt.h>

namespace nrl::monitor {
namespace {

double& seconds_of(StartPhases::Seconds& all, std::string_view part) {
  const auto at = std::find_if(all.begin(), all.end(), [&](const auto& p) { return p.first == part; });
  return at != all.end() ? at->second : all.emplace_back(part, 0.0).second;
}

std::string text_of(const StartPhases::Seconds& all) {
  std::string text;
  for (const auto& [part, seconds] : all)
    text += fmt::format("{}{} {:.2f}", text.empty() ? "" : ", ", part, seconds);
  return text + " s";
}

}  // namespace

StartPhases::StartPhases(Print print, std::chrono::milliseconds patience, std::chrono::milliseconds repeat)
    : print_(std::move(print)), patience_(patience), repeat_(repeat) {}

void StartPhases::begin(std::string part, std::string phase) {
  {
    const std::lock_guard lock(mutex_);
    close();
    part_ = std::move(part);
    phase_ = std::move(phase);
    begun_ = Clock::now();
    ended_ = false;
    seconds_of(parts_, part_);
  }
  if (!print_ || thread_.joinable()) return;
  try {
    thread_ = std::thread([this] { watch(); });
  } catch (const std::system_error&) {
    // Without a thread nothing is printed.
  }
}

void StartPhases::close() {
  if (ended_) return;
  ended_ = true;
  seconds_of(parts_, part_) += std::chrono::duration<double>(Clock::now() - begun_).count();
}

void StartPhases::end() {
  {
    const std::lock_guard lock(mutex_);
    close();
  }
  if (!thread_.joinable()) return;
  over_.notify_all();
  thread_.join();
  thread_ = {};
}

void StartPhases::add(std::string_view part, double seconds, std::string_view from) {
  const std::lock_guard lock(mutex_);
  seconds_of(parts_, part) += seconds;
  if (!from.empty()) seconds_of(parts_, from) -= seconds;
}

void StartPhases::add_beside(std::string_view part, double seconds) {
  const std::lock_guard lock(mutex_);
  seconds_of(beside_, part) += seconds;
}

StartPhases::Seconds StartPhases::parts() const {
  const std::lock_guard lock(mutex_);
  return parts_;
}

std::string StartPhases::text() const {
  const std::lock_guard lock(mutex_);
  return text_of(parts_) + (beside_.empty() ? "" : "; beside them: " + text_of(beside_));
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

}  // namespace nrl::monitor
