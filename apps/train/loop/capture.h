#pragma once
// The record of a window of steps: what core/trace, the log of communication and the plan say of it, put
// together for the analyses of apps/profile.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "apps/profile/recorded.h"
#include "apps/train/start/run.h"

namespace nrl::train {

/// The rates of one rank's device: measured on a CPU, on the data sheet of a GPU. Takes about 50 ms on a CPU,
/// where all ranks must measure at once, as they work.
profile::Peaks measure_peaks(const ops::Exec& exec);

/// The engine that is recorded, with its ranks: of a run or of a benchmark.
struct Recording {
  comm::World& world;
  const Placement& placement;
  engine::Engine& engine;
  const ConfigResult& config;

  const plan::RunPlan& plan() const { return engine.plan(); }
};
inline Recording recording(Run& run) {
  return {.world = run.world, .placement = run.placement, .engine = *run.engine, .config = run.repeatable};
}

/// Records the ops of a process from its constructor until finish(). At most one per process at a time.
class LocalCapture {
 public:
  /// The window begins with step `first`. `calls`: ops of a step, roughly; there is space for `steps` steps
  /// with as many. `exec` must outlive this.
  LocalCapture(ops::Exec& exec, int64_t first, int64_t steps, size_t calls);
  ~LocalCapture();
  LocalCapture(const LocalCapture&) = delete;
  LocalCapture& operator=(const LocalCapture&) = delete;

  /// Must be called before each step. On a GPU the caller must also set trace::Tag::step.
  void begin_step();
  int64_t first() const { return first_; }
  int64_t steps() const { return static_cast<int64_t>(begins_.size()); }

  /// Ends the window with the last step that began, or, if `ended`, at its begin. Without communication,
  /// memory and peaks.
  profile::Recorded finish(bool ended = false);

 private:
  ops::Exec& exec_;
  int64_t first_;
  std::vector<int64_t> begins_;
  std::vector<ops::Cost> costs_;
  profile::HostCounters at_begin_;
};

/// Records the steps of an engine with its ranks.
class Capture {
 public:
  /// The window begins with step `first`. `calls`: ops of a step, roughly; there is space for `steps` steps
  /// with as many. All of `of` must outlive this.
  Capture(const Recording& of, int64_t first, int64_t steps, size_t calls);

  /// Must be called before each step.
  void begin_step() { local_.begin_step(); }
  int64_t first() const { return local_.first(); }

  /// Ends the window with the last step that began, whose results must have been collected. Collective over
  /// the run: ranks exchange when they arrived in collectives.
  profile::Recorded finish();

 private:
  const Recording of_;
  LocalCapture local_;
};

}  // namespace nrl::train
