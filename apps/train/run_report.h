#pragma once
// What a run tells: on the terminal, in metrics.jsonl, and at its end.

#include <string>

#include "apps/train/report/metrics.h"
#include "apps/train/report/start_phases.h"
#include "apps/train/report/statistics.h"
#include "apps/train/report/terminal.h"
#include "apps/train/report/timers.h"
#include "apps/train/run.h"
#include "apps/train/step_profile.h"

namespace nrl::train {

/// What the host knows of a step before its results are back.
struct StepInFlight {
  int64_t step = 0;
  double lr = 0;
  SectionTimes times;
  double exposed = 0;       ///< seconds of communication that the host waited for
  int64_t loss_tokens = 0;  ///< of all ranks
  double keys = 0;          ///< that a token of this rank sees on average
};

class RunReport {
 public:
  /// Opens metrics.jsonl and writes config.yaml (rank 0). `start`: steady seconds when the run began. All
  /// references must outlive the report.
  RunReport(Run& run, Terminal& terminal, StartPhases& phases, double start);

  void banner();
  /// The first step of this process is about to be made.
  void first_step();
  /// A step begins while none is in flight.
  void idle_until_now() { mark_ = Timers::steady_seconds(); }
  void step(const StepInFlight& step, const engine::StepResult& result);
  void evaluation(double loss, double seconds);
  void checkpoint(const std::string& path, double seconds);
  void sample(const std::string& text);
  void trace(const std::string& path);
  void note(const std::string& text) { terminal_.note(text); }
  void warn(const std::string& text) { terminal_.warn(text); }
  /// Whether the weights that this process started from can be at fault for a divergence; it began with
  /// `first_updates` updates.
  std::string blame_for_divergence(int64_t first_updates) const;
  void summary(std::string outcome, Exit code);

  Timers& timers() { return timers_; }
  StepProfile& profile() { return profile_; }
  /// Seconds of communication that the host has waited for so far.
  double exposed_seconds() const;
  int64_t tokens_per_step() const;

 private:
  bool first() const { return run_.world.rank() == 0; }
  /// `keys`: that a token sees on average.
  double rank_flops(double tokens_per_s, double keys) const;
  std::optional<double> mfu(double tokens_per_s, double keys) const;
  template <class Write>
  void log_row(const Write& write);

  Run& run_;
  Terminal& terminal_;
  StartPhases& phases_;
  MetricsLog metrics_;
  StepProfile profile_;
  Timers timers_;
  PeakEstimate peak_;
  Histogram rates_, step_seconds_;
  double mean_keys_ = 0;  // of the steps in rates_
  double start_;
  double mark_ = 0;  // when the result of the step before came, or the first one in flight began
  int64_t first_step_;
  std::string checkpoint_;  // the last one written
};

}  // namespace nrl::train
