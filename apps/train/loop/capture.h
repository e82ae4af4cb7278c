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

/// Records steps from its constructor until finish(). At most one per process at a time.
class Capture {
 public:
  /// The window begins with step `first`. `calls`: ops of a step, roughly; there is space for `steps` steps
  /// with as many. All of `of` must outlive this.
  Capture(const Recording& of, int64_t first, int64_t steps, size_t calls);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  /// Must be called before each step.
  void begin_step();
  int64_t first() const { return first_; }

  /// Ends the window with the last step that began, whose results must have been collected. Collective over
  /// the run: ranks exchange when they arrived in collectives.
  profile::Recorded finish();

 private:
  const Recording of_;
  int64_t first_;
  std::vector<int64_t> begins_;
  std::vector<ops::Cost> costs_;
  profile::HostCounters at_begin_;
};

}  // namespace nrl::train
