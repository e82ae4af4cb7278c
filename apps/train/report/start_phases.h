#pragma once
// What a start-up that takes long is doing.

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace nrl::train {

/// Prints nothing in a quick start. From `patience` after the first begin() on, looks every `patience` which
/// phase is under way, and prints it when it is another one than at the last print or that print is `repeat`
/// old.
class StartPhases {
 public:
  /// Called on a thread of its own, never after end(): the phase and its seconds so far.
  using Print = std::function<void(std::string_view phase, double seconds)>;
  explicit StartPhases(Print print, std::chrono::milliseconds patience = std::chrono::seconds(2),
                       std::chrono::milliseconds repeat = std::chrono::seconds(30));
  ~StartPhases() { end(); }
  StartPhases(const StartPhases&) = delete;
  StartPhases& operator=(const StartPhases&) = delete;

  /// The phase before it is over.
  void begin(std::string phase);
  /// All are over; begin() starts anew.
  void end();

 private:
  using Clock = std::chrono::steady_clock;
  void watch();

  Print print_;
  std::chrono::milliseconds patience_, repeat_;
  std::mutex mutex_;
  std::condition_variable over_;
  bool ended_ = false;
  std::string phase_;
  Clock::time_point begun_;
  std::thread thread_;
};

}  // namespace nrl::train
