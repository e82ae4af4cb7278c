#pragma once
// Stopping on request: signals become a flag that the step loop reads and all ranks agree on.

#include <csignal>
#include <string>

namespace nrl {

/// While an object of this class lives, SIGUSR1, SIGTERM and SIGINT set a flag (the first one is remembered)
/// and SIGPIPE and SIGCONT are ignored; the destructor puts the previous actions back. The second of SIGINT
/// and SIGTERM ends the process at once with 128 + its number. One exception: Slurm itself sends SIGTERM
/// twice at a time limit and at a preemption, so inside a Slurm job only SIGINT counts as a second request.
/// At most one object at a time; the handlers are async-signal-safe and restart interrupted system calls.
class StopSignals {
 public:
  enum class Term { by_environment, second_leaves, never_leaves };
  /// `by_environment`: never_leaves when SLURM_JOB_ID is set.
  explicit StopSignals(Term term = Term::by_environment);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The number of the first stop signal since construction, 0 when there was none. Safe on any thread.
  static int requested();

 private:
  static constexpr int kSignals = 5;
  struct sigaction previous_[kSignals];
};

/// "SIGUSR1", "SIGTERM", "SIGINT"; "signal N" for others.
std::string signal_name(int number);

}  // namespace nrl
