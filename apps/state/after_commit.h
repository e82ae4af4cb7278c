#pragma once
// Work on checkpoints that are saved already, on rank 0 beside the steps: they are read back, given to a
// command of the user, and the oldest removed.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/config/config.h"

namespace nrl::train {

class AfterCommit {
 public:
  /// Starts nothing: a thread, without signals and of idle I/O priority, is started by the first checkpoint
  /// that needs one. `log_dir`: gets after-save.log, the command's output. The command is killed after
  /// `command_s` seconds.
  AfterCommit(const CheckpointingConfig& config, std::string log_dir, double command_s = default_command_s);
  /// Commands are waited for, and a reading for some seconds.
  ~AfterCommit();
  AfterCommit(const AfterCommit&) = delete;
  AfterCommit& operator=(const AfterCommit&) = delete;

  /// After each commit: removes old checkpoints (apply_retention()), except those that the command still
  /// needs, and returns. One checkpoint at a time is worked on, and of those that wait only the newest is:
  /// the others are left out, with a warning if there is a command. Failures of all this are warnings.
  void committed(int64_t step, const std::string& path);
  /// Returns when all commands have ended; makes progress meanwhile (core/base/status.h).
  void finish();

  static constexpr double default_command_s = 1800;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace nrl::train
