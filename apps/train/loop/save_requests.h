#pragma once
// Requests for checkpoints besides save_period, and for the end of the run: by time, and by files in the log
// directory.

#include <cstdint>
#include <optional>
#include <string>

#include "core/config/config.h"

namespace nrl::train {

/// When a checkpoint is due, and when the run must end to save in time. Times are seconds on any one clock.
class SaveTimes {
 public:
  /// `save_seconds`: between two checkpoints; unset: no limit. `deadline`: of the last save's end; unset:
  /// none.
  SaveTimes(std::optional<double> save_seconds, std::optional<double> deadline, double now)
      : save_seconds_(save_seconds), deadline_(deadline), saved_(now), looked_(now) {}

  /// A checkpoint was saved, or failed, which took `seconds`.
  void saved(double now, double seconds);
  /// Between two steps. Learns the longest time between two calls without a save.
  void look(double now);
  bool save_due() const { return save_seconds_ && looked_ - saved_ >= *save_seconds_; }
  /// The next step and 1.5 times the longest save would end after the deadline.
  bool stop_due() const {
    return deadline_ && looked_ + 2 * longest_step_ + 1.5 * longest_save_ >= *deadline_;
  }

 private:
  std::optional<double> save_seconds_, deadline_;
  double saved_, looked_;
  double longest_step_ = 0, longest_save_ = 0;
  bool has_looked_ = false;  // since the last save
};

/// Rank 0's view of all requests, once before each step.
class SaveRequests {
 public:
  struct Asked {
    bool stop = false, save = false;
  };
  /// `active`: on rank 0; elsewhere nothing is ever asked. Removes requests of an earlier run.
  SaveRequests(const Config& config, bool active);

  /// Looks at the clock, and once a second for LOG_DIR/save and LOG_DIR/stop, which it removes. A stop is
  /// asked for until the end.
  Asked look();
  /// The last checkpoint was saved, or failed, after `seconds`.
  void saved(double seconds);

  static constexpr const char *save_file = "save", *stop_file = "stop";

 private:
  bool take(const char* name) const;

  bool active_;
  std::string log_dir_;
  SaveTimes times_;
  double next_look_ = 0;
  bool stops_ = false;
};

}  // namespace nrl::train
