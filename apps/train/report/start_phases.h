#pragma once
// Shows the progress of a slow start-up.

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace nrl::train {

/// Prints nothing if the start-up is fast. Every `patience` after the first begin(), a thread prints the
/// current phase if it has changed since the last print, or if the last print is `repeat` old.
class StartPhases {
 public:
  /// Called on a separate thread, never after end(): the phase and its duration so far.
  using Print = std::function<void(std::string_view phase, double seconds)>;
  explicit StartPhases(Print print, std::chrono::milliseconds patience = std::chrono::seconds(2),
                       std::chrono::milliseconds repeat = std::chrono::seconds(30));
  ~StartPhases() { end(); }
  StartPhases(const StartPhases&) = delete;
  StartPhases& operator=(const StartPhases&) = delete;

  /// Ends the previous phase and begins this one.
  void begin(std::string phase);
  /// Ends the last phase and joins the thread. begin() may be called again.
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
