#pragma once
// Shows the progress of a slow start-up, and how long its parts took.

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace nrl::monitor {

/// Prints nothing if the start-up is fast. Every `patience` after the first begin(), a thread prints the
/// current phase if it has changed since the last print, or if the last print is `repeat` old.
class StartPhases {
 public:
  /// Called on a separate thread, never after end(): the phase and its duration so far.
  using Print = std::function<void(std::string_view phase, double seconds)>;
  /// `print` may be empty: durations only, without a thread.
  explicit StartPhases(Print print = {}, std::chrono::milliseconds patience = std::chrono::seconds(2),
                       std::chrono::milliseconds repeat = std::chrono::seconds(30));
  ~StartPhases() { end(); }
  StartPhases(const StartPhases&) = delete;
  StartPhases& operator=(const StartPhases&) = delete;

  /// Ends the previous phase and begins this one. Phases of one `part` ("weights") are added up.
  void begin(std::string part, std::string phase);
  /// Ends the last phase and joins the thread. begin() may be called again.
  void end();

  /// Adds time before the first phase, or that another part was charged with: `from` is not empty.
  void add(std::string_view part, double seconds, std::string_view from = {});
  /// Adds time of a thread beside the phases.
  void add_beside(std::string_view part, double seconds);

  /// Seconds by part, in the order of their first phases. Without the current phase.
  using Seconds = std::vector<std::pair<std::string, double>>;
  Seconds parts() const;
  /// "device 0.41, plans 2.10, first step 0.80 s; beside them: weights 1.95 s".
  std::string text() const;

 private:
  using Clock = std::chrono::steady_clock;
  void watch();
  void close();  // with the mutex locked

  Print print_;
  std::chrono::milliseconds patience_, repeat_;
  mutable std::mutex mutex_;
  std::condition_variable over_;
  bool ended_ = true;
  std::string part_, phase_;
  Clock::time_point begun_;
  Seconds parts_, beside_;
  std::thread thread_;
};

}  // namespace nrl::monitor
