#pragma once
// Reports a training run: terminal output, metrics.jsonl and the final summary.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/monitor/live.h"
#include "apps/monitor/metrics.h"
#include "apps/monitor/run_file.h"
#include "apps/monitor/sinks.h"
#include "apps/monitor/start_phases.h"
#include "apps/monitor/statistics.h"
#include "apps/monitor/terminal.h"
#include "apps/monitor/timers.h"
#include "apps/train/loop/memory_watch.h"
#include "apps/train/loop/step_profile.h"
#include "apps/train/loop/step_source.h"
#include "apps/train/start/run.h"

namespace nrl::train {

/// The host's data of a step whose results are still pending.
struct StepInFlight {
  int64_t step = 0;
  double lr = 0;
  monitor::SectionTimes times;
  double exposed = 0;  ///< seconds of exposed communication
  StepSource::Totals totals;
  int64_t tokens_so_far = 0;  ///< of the run, with this step
  double keys = 0;            ///< mean number of keys that a token of this rank attends to
  int64_t first_sample = 0;   ///< of the run
  bool layer_statistics = false;
  std::optional<double> straggler_ratio;  ///< StragglerWatch::ratio()
};

class RunReport {
 public:
  /// Opens metrics.jsonl and the sinks, and writes config.yaml and run.json (rank 0). `start`:
  /// Timers::steady_seconds() at the start of the run. `reported`: whose sections logger and monitoring
  /// count; null: the run's. All references must outlive the report.
  RunReport(Run& run, monitor::Terminal& terminal, monitor::StartPhases& phases, double start,
            const Config* reported = nullptr);

  void banner();
  /// Collective. Must be called before the first step of this process.
  void first_step();
  /// Must be called before a step that starts with none in flight: restarts the step clock.
  void restart_step_clock() { last_result_ = monitor::Timers::steady_seconds(); }
  void step(const StepInFlight& step, const engine::StepResult& result,
            std::optional<monitor::LayerTable> layers = {});
  /// `metrics`: of the objective.
  void evaluation(const std::vector<double>& metrics, double seconds);
  /// The same with rollouts.
  void evaluation(std::vector<monitor::Metric> metrics, std::optional<double> loss, double seconds);
  /// Must be called before a checkpoint is saved: a session that starts from it continues the sinks there.
  void before_checkpoint() { sinks_->end_step(); }
  /// A checkpoint of this step is saved.
  void checkpoint(int64_t step, const std::string& path, double seconds);
  void sample(const std::string& text);
  void profiled(const StepProfile::Written& written);
  void note(const std::string& text) { terminal_.note(text); }
  /// A warning of rank 0, and an alert of this rule.
  void warn(std::string_view rule, const std::string& text,
            monitor::AlertLevel level = monitor::AlertLevel::critical);
  /// A step that was skipped because of a limit: a row of skipped.jsonl.
  void skipped(const StepInFlight& step, double loss, double grad_norm);
  /// The run went back from step `from` to the checkpoint of its position. Rows of later steps are removed
  /// from metrics.jsonl and superseded in the sinks, as by a resume.
  void rolled_back(int64_t from, int64_t first_sample, int64_t end_sample, const std::string& text);
  /// The cause of a non-finite step, and a critical alert.
  void found_nan(int64_t step, const std::string& text);
  /// Rank 0: the next step shall end with a gathering of telemetry and leaks (StepInput::gather).
  bool wants_gathering() const { return live_ && live_->due(monitor::Timers::steady_seconds()); }
  /// Must be called before work that takes the place of steps: evaluations, checkpoints.
  void pause() {
    if (live_) live_->pause();
  }
  /// For the message of a divergence: whether the weights that this process started from may be the cause.
  /// `first_updates`: updates at its start.
  std::string divergence_hint(int64_t first_updates) const;
  void summary(std::string outcome, Exit code);

  monitor::Timers& timers() { return timers_; }
  /// Rank 0.
  const monitor::RunFile& run_file() const { return file_; }
  StepProfile& profile() { return profile_; }
  /// What the groups of ranks communicated since the first step, the most exposed first.
  std::vector<monitor::CommFacts> communication() const;
  /// Seconds of exposed communication so far.
  double exposed_seconds() const;

 private:
  bool first() const { return run_.world.rank() == 0; }
  void report_evaluation(monitor::EvalFacts facts, double seconds);
  /// Model FLOP/s of a rank. `keys`: mean number of keys that a token attends to.
  double rank_flops(double tokens_per_s, double keys) const;
  std::optional<double> mfu(double tokens_per_s, double keys) const;
  int64_t peak_resident(double now);
  /// Collective. Writes memory.json: the arena and the peak resident memory of every rank.
  void write_memory();
  /// Collective.
  std::unique_ptr<monitor::Live> open_live();
  /// Hands a step to live_.
  void step_live(const monitor::StepFacts& facts, double seconds);
  /// Collective: rank 0 gets telemetry and leaks of all ranks.
  void gather(const monitor::StepFacts& facts);
  /// Warns of leaks, which other ranks tell rank 0 of at the next gathering, for its alerts.
  void watch_memory(int64_t step);
  template <class Write>
  void log_row(const Write& write);
  void begin_session();
  /// Rank 0: opens the sinks of the configuration. `resumed`: they have rows of this run already.
  void open_sinks(double now, bool resumed);
  void end_session(monitor::RunSummary& summary, Exit code);
  /// Time of the steps that count, those that were lost to a restart or skipped left out, over the wall time
  /// since the run was created. Rank 0.
  double goodput(double now) const { return good_ms_ * 1e-3 / std::max(now - file_.created, 1e-3); }

  Run& run_;
  const Config& reported_;
  monitor::Terminal& terminal_;
  monitor::StartPhases& phases_;
  monitor::MetricsLog metrics_;
  std::optional<monitor::MetricsLog> skipped_;  // with limits or rollbacks
  monitor::RunFile file_;                       // rank 0
  std::optional<monitor::Sinks> sinks_;         // without sinks on other ranks
  StepProfile profile_;
  monitor::Timers timers_;
  monitor::PeakEstimate peak_;
  MemoryWatch memory_;
  std::vector<monitor::Leak> leaks_;     // that rank 0 does not know of
  std::unique_ptr<monitor::Live> live_;  // null without telemetry, alerts and live views
  monitor::Histogram rates_, step_seconds_;
  double good_ms_;        // of steps that count, in all sessions
  double mean_keys_ = 0;  // over the steps in rates_
  double start_;
  int64_t resident_ = 0;  // bytes, the peak so far
  double next_resident_ = 0;
  double last_result_ = 0;  // time of the previous step's result, or of the last restart_step_clock()
  int64_t first_step_, first_tokens_;
  std::string checkpoint_;  // the last one saved
};

}  // namespace nrl::train
