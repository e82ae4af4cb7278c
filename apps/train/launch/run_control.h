#pragma once
// The control plane of a training run: ranks that die, stop or hang end the run on all ranks, with one
// message and one exit code (parallel/control).

#include <memory>
#include <vector>

#include "apps/train/launch/watchdog.h"
#include "core/config/config.h"
#include "parallel/comm/world/world.h"
#include "parallel/control/control.h"

namespace nrl::train {

class RunControl {
 public:
  /// Watches the start of a run: ends the process if it is not connected within half an hour, or if its
  /// launcher ends. Nothing for a process without peers.
  RunControl();
  RunControl(const RunControl&) = delete;
  RunControl& operator=(const RunControl&) = delete;
  ~RunControl();

  /// Collective, the first call counts. `world` must outlive the object.
  void connect(comm::World& world, const ReliabilityConfig& config);
  bool connected() const { return connected_; }
  /// A failure of this rank that the others do not know of: ends the run. After connect(). Any thread.
  [[noreturn]] void fail(const Error& error);
  /// The device does not respond: all ranks are asked what they wait for.
  [[noreturn]] void hangs(const Error& error);
  /// The GPU of this rank cannot be used any more: all ranks leave. After connect(). Any thread.
  [[noreturn]] void gpu_failed(std::string_view text);
  /// A failure is known here: a signal to stop is the launcher's clean-up.
  bool failing() const { return connected_ && control_->is_failing(); }
  /// The pace of every rank of the world (reliability.stragglers), on the process that the launcher numbered
  /// 0; empty elsewhere. On the thread of the steps.
  std::vector<control::Control::PaceReading> paces() const;
  /// Rank 0 may publish files of the run: it reaches a majority of the nodes and knows of no failure.
  bool may_commit() const { return !connected_ || control_->may_commit(); }
  /// After the last collective.
  void finish();

  /// The object that exists, if any.
  static RunControl* current();

 private:
  control::StatusSample sample();
  static void last_words(control::Text<398>& text);
  void leave(const control::Failure& failure);

  void keep_stacks(const control::Verdict& verdict);

  comm::World* world_ = nullptr;
  bool stacks_ = true;
  Watchdog watchdog_;  // of the control thread
  bool connected_ = false;
  std::unique_ptr<control::Control> control_;  // last: its threads use the others
};

WatchdogLimits watchdog_limits(const ReliabilityConfig& config);
control::Options control_options(const ReliabilityConfig& config);

}  // namespace nrl::train
