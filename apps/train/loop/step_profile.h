#pragma once
// Kernel times per step, and the windows of steps that are recorded.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/monitor/kernel_times.h"
#include "apps/profile/profile.h"
#include "apps/train/loop/capture.h"
#include "apps/train/start/run.h"
#include "core/base/text.h"
#include "core/trace/trace.h"

namespace nrl::train {

/// The steps that profiling.steps and profiling.every select.
struct ProfiledSteps {
  StepRange range;                    ///< empty: none
  std::optional<int64_t> every = {};  ///< repeated each so many steps
  bool contains(int64_t step) const;
  /// How many steps from `step` on, which must be one of them, are recorded one after another.
  int64_t from(int64_t step) const;
};

/// At most one per process, because the ranges of core/trace are global. On a GPU a range costs two events in
/// the stream, so ranges are only timed in profiled steps.
///
/// A window has consecutive steps: it ends before an evaluation, a text sample or a checkpoint, and the steps
/// after that are a window of their own. A run that is resumed within the steps records the rest of them.
class StepProfile {
 public:
  explicit StepProfile(Run& run);
  ~StepProfile();
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;

  /// Must be called before step `step` (from 1). Starts and ends the capture of Nsight Systems, too.
  void begin_step(int64_t step);
  /// True if this rank was asked to record steps, by a signal or, of rank 0, by a file
  /// (profile::take_request). The caller must then see to it that all ranks call record_next().
  bool requested();
  /// Records the steps from `step` on that were asked for. Collective.
  void record_next(int64_t step);
  /// True while a window is open: its steps must not be graphs, in which ranges time nothing.
  bool active() const { return capture_ != nullptr; }
  /// True if the window ends with step `step`; the caller must then collect its results and call write().
  /// `interrupted`: other work follows, or nothing.
  bool ends_with(int64_t step, bool interrupted) const;
  /// Ends the window and writes what was recorded. Collective.
  struct Written {
    std::string directory;
    std::string warning = {};     ///< what is wrong with the record; empty: nothing
    std::string regression = {};  ///< monitoring.analysis.performance_regression, on rank 0; empty: none
  };
  Written write();

  struct KernelSeconds {
    double gemm = 0, attention = 0;
  };
  /// The kernel time of step `step`, in which `seconds` were spent computing. Must be called after every
  /// step.
  KernelSeconds end_step(int64_t step, double seconds);
  /// Must be called after work between steps whose kernels belong to none.
  void skip();

  /// Seconds by kernel in the steps that were timed: all of them; on a GPU the steps of windows.
  std::vector<std::pair<std::string, double>> kernels() const;
  /// Seconds spent computing in these steps.
  double timed_seconds() const { return kernel_times_.seconds(); }
  /// "of steps 3-5" where only these were timed; empty where all were.
  std::string timed_steps() const;

 private:
  monitor::KernelTimes::Totals totals() const;
  std::string regression_of(profile::Profile&& window);

  void capture_outside(int64_t step);

  Run& run_;
  ProfiledSteps steps_, asked_;    // of the configuration; of the last request
  int64_t end_ = 0;                // the step after the window
  std::optional<StepRange> nsys_;  // steps that Nsight Systems captures
  bool capturing_ = false;         // it does
  int64_t wanted_ = 0;             // steps of a request that is under way
  double next_look_ = 0;           // for a request file, monotonic seconds
  // Ops of a step, roughly. A run that records on request has not counted them: there is space for many.
  size_t calls_ = 32'000;
  std::unique_ptr<Capture> capture_;
  monitor::KernelTimes kernel_times_;
  std::optional<profile::Profile> first_window_;      // on rank 0, with performance_regression
  std::string last_;                                  // directory of the last window of profiling.every
  std::optional<std::pair<int64_t, int64_t>> timed_;  // on a GPU: the first and the last step that was timed
};

}  // namespace nrl::train
