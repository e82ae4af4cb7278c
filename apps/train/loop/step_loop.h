#pragma once
// The loop over optimizer steps, with evaluations, text samples, checkpoints and stop requests between them.

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/engine/layer_statistics.h"
#include "apps/monitor/stability.h"
#include "apps/train/loop/integrity.h"
#include "apps/train/loop/lr_schedule.h"
#include "apps/train/loop/rollout_source.h"
#include "apps/train/loop/run_report.h"
#include "apps/train/loop/save_requests.h"
#include "apps/train/loop/step_source.h"
#include "apps/train/loop/stragglers.h"
#include "apps/train/loop/text_samples.h"
#include "apps/train/start/run.h"
#include "core/trace/trace.h"

namespace nrl::train {

class StepLoop {
 public:
  /// `samples` may be null: no text samples on this rank. All arguments must outlive the loop.
  StepLoop(Run& run, RunReport& report, TextSamples* samples);

  /// Collective. Returns the exit code that all ranks leave with.
  Exit run();

 private:
  void enter_epoch();
  void begin_step(StepSource& source);
  /// The statistics of layers of a step that was collected. Collective.
  monitor::LayerTable layer_table(const engine::StepResult& result);
  std::optional<Exit> finish_steps(int leave);
  std::unique_ptr<StepSource> open_source();
  /// The limits of the next step, by monitoring.stability.
  engine::StepBounds bounds(const StepSource::Totals& totals) const;
  /// Looks for instability in a finished step, and for the cause of one that is not finite. Collective.
  void guard(const StepInFlight& step, const engine::StepResult& result);
  /// Collective: goes back to a checkpoint from before unstable_. Returns an exit code if the run ends.
  std::optional<Exit> recover();
  Exit give_up(const std::string& why);
  Exit diverged();
  std::string precision_advice() const;
  std::optional<Exit> stopped();
  void require_locks();
  /// Collective, between steps: reliability.replica_check_period.
  void compare_replicas();
  void evaluate();
  /// `stopping`: the run ends afterwards.
  void save(bool stopping = false);
  void saved(int64_t step, const std::string& path, double seconds);
  void save_failed(int64_t step, const Error& error, bool ends);
  /// Ends the save in flight, if any, when it is done, or `waits` for it: then it is collective, and all
  /// ranks know the same afterwards.
  void end_save(bool waits, bool next_is_due = false);
  Exit finish(std::string outcome, Exit code);

  Run& run_;
  RunReport& report_;
  TextSamples* samples_;
  RolloutSource* rollouts_ = nullptr;  // null: rollouts are not generated
  LrSchedule schedule_;
  SaveRequests requests_;
  bool save_asked_ = false;  // by a step that was collected
  std::deque<StepInFlight> in_flight_;
  int64_t first_step_, first_updates_;  // of this process
  int64_t epoch_ = 0;                   // from 1; 0: none yet
  bool epoch_seen_ = false;
  std::optional<trace::Range> epoch_range_;
  int failed_saves_ = 0;
  int64_t saved_step_ = -1;
  bool warned_of_slow_saves_ = false;
  std::optional<engine::LayerStatistics> layer_statistics_;  // unset: logger.layer_stats_period is 0
  std::optional<ReplicaCheck> replicas_;                     // unset: not compared, or there are none
  int64_t compared_ = -1;                                    // the step after which the replicas agreed
  std::optional<monitor::Stability> stability_;              // unset: monitoring.stability is off
  std::optional<StragglerWatch> stragglers_;                 // unset: reliability.stragglers is false
  std::optional<monitor::Finding> unstable_;                 // to recover from
  std::vector<std::string> rollbacks_;                       // of this process
};

}  // namespace nrl::train
