#pragma once
// The loop over optimizer steps, with what happens between them: evaluations, samples, checkpoints, a stop.

#include <deque>
#include <optional>
#include <string>

#include "apps/train/lr_schedule.h"
#include "apps/train/run.h"
#include "apps/train/run_report.h"
#include "apps/train/text_samples.h"

namespace nrl::train {

class StepLoop {
 public:
  /// `samples` is null where no text is sampled. All must outlive the loop.
  StepLoop(Run& run, RunReport& report, TextSamples* samples);

  /// Collective. Returns the exit code that all ranks leave with.
  Exit run();

 private:
  void begin_step(data::BatchLoader& loader, const data::LoaderOptions& loading);
  int64_t loss_tokens_of_all(const plan::BatchCounts& mine);
  std::optional<Exit> finish_steps(int leave);
  Exit diverged();
  std::optional<Exit> stopped();
  void evaluate();
  /// `stopping`: all ranks leave after it.
  void save(bool stopping = false);
  Exit finish(std::string outcome, Exit code);

  Run& run_;
  RunReport& report_;
  TextSamples* samples_;
  engine::LanguageModeling objective_;
  LrSchedule schedule_;
  std::deque<StepInFlight> in_flight_;
  int64_t first_step_, first_updates_;  // of this process
  int failed_saves_ = 0;
  double last_heartbeat_ = 0;
};

}  // namespace nrl::train
