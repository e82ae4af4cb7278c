#include "apps/train/loop/step_profile.h"

#include <algorithm>
#include <span>
#include <utility>

#include "apps/monitor/timers.h"
#include "apps/profile/compare.h"
#include "apps/profile/request.h"
#include "apps/train/launch/stop_signal.h"
#include "apps/train/loop/profile_files.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/config/nsys.h"
#include "core/ops/coverage.h"
#include "core/ops/kernel_table.h"
#include "core/trace/device_timeline.h"

namespace nrl::train {

namespace {

constexpr double allowed_growth = 0.1;  // of the step of the first window

}  // namespace

bool ProfiledSteps::contains(int64_t step) const {
  if (range.first == 0 || step < range.first) return false;
  const int64_t at = every ? (step - range.first) % *every : step - range.first;
  return at < range.end - range.first;
}

int64_t ProfiledSteps::from(int64_t step) const {
  const int64_t at = every ? (step - range.first) % *every : step - range.first;
  return range.end - range.first - at;
}

StepProfile::StepProfile(Run& run) : run_(run) {
  const ProfilingConfig& c = run.config.profiling;
  if (c.enabled) {
    steps_ = {.range = parse_step_range(c.steps).value(), .every = c.every};
    calls_ = run.engine->dry_step(run.engine->objective(), true).calls.size();
  }
  if (run.engine->exec().device)
    if (const auto window = nsys_window(c)) nsys_ = window->steps;
  if (run.world.rank() == 0) profile::remove_request(run.config.logger.log_dir);  // of an earlier run
  trace::start(run.engine->exec().device ? trace::Mode::off : trace::Mode::totals);
}

StepProfile::~StepProfile() {
  capture_.reset();
  trace::detach_device();
  if (!capturing_) return;
  try {
    run_.engine->exec().device->profiler(false);
  } catch (const Error&) {  // the device is broken, which has been reported
  }
}

// The capture begins and ends on an idle device, so that it holds whole steps.
void StepProfile::capture_outside(int64_t step) {
  const bool within = step >= nsys_->first && step < nsys_->end;
  if (within == capturing_) return;
  device::Runtime& device = *run_.engine->exec().device;
  device.synchronize();
  device.profiler(within);
  capturing_ = within;
  if (within && run_.world.rank() == 0) log::info("nsys captures steps {} to {}", step, nsys_->end - 1);
}

void StepProfile::begin_step(int64_t step) {
  if (nsys_) capture_outside(step);
  if (!capture_) {
    const ProfiledSteps* const due = steps_.contains(step)   ? &steps_
                                     : asked_.contains(step) ? &asked_
                                                             : nullptr;
    if (!due) return;
    end_ = std::min(step + due->from(step), run_.max_steps() + 1);
    capture_ = std::make_unique<Capture>(recording(run_), step, end_ - step, calls_);
    kernel_times_.restart();
  }
  capture_->begin_step();
}

bool StepProfile::requested() {
  if (stop::take_profile_request()) wanted_ = profile::requested_steps;
  constexpr double look_every = 1;  // seconds
  const double now = monitor::Timers::steady_seconds();
  if (run_.world.rank() == 0 && now >= next_look_) {
    next_look_ = now + look_every;
    try {
      if (const auto steps = profile::take_request(run_.config.logger.log_dir)) wanted_ = *steps;
    } catch (const Error& e) {
      log::warn("{}", e.what());
    }
  }
  return wanted_ > 0;
}

void StepProfile::record_next(int64_t step) {
  run_.engine->finish_gathers();  // the order of collectives must be the same on all ranks
  auto steps = std::exchange(wanted_, 0);
  run_.world.comm().host().all_reduce(std::span(&steps, 1), comm::Reduce::max);
  // On a GPU results come a step late, so that a request may be repeated by the step after it.
  if (steps > 0 && !capture_ && !asked_.contains(step)) asked_ = {.range = {step, step + steps}};
}

bool StepProfile::ends_with(int64_t step, bool interrupted) const {
  return capture_ && (interrupted || step + 1 == end_);
}

StepProfile::Written StepProfile::write() {
  const profile::Recorded record = capture_->finish();
  capture_.reset();
  if (run_.engine->exec().device) kernel_times_.restart();  // the totals were cleared
  WrittenProfile written = write_profile(recording(run_), record, run_.config.logger.log_dir);
  Written out{.directory = written.directory};
  if (run_.config.monitoring.analysis.performance_regression && run_.world.rank() == 0)
    out.regression = regression_of(std::move(written.merged));
  // Timelines are large: only the last one of many windows keeps them.
  if (run_.config.profiling.every && !last_.empty()) remove_timelines(recording(run_), last_);
  last_ = out.directory;
  if (record.window.dropped > 0)
    out.warning = fmt::format("profile: {} ranges were not recorded; expected 0. Fix: fewer profiling.steps",
                              grouped(record.window.dropped));
  return out;
}

std::string StepProfile::regression_of(profile::Profile&& window) {
  if (!first_window_) {
    first_window_ = std::move(window);
    return "";
  }
  return profile::slower_text(*first_window_, window, allowed_growth);
}

monitor::KernelTimes::Totals StepProfile::totals() const {
  monitor::KernelTimes::Totals out;
  for (const trace::Total& total : run_.engine->exec().device ? trace::device_totals() : trace::totals())
    out.emplace(total.name, total.seconds);
  return out;
}

StepProfile::KernelSeconds StepProfile::end_step(int64_t step, double seconds) {
  if (run_.engine->exec().device) {
    // The step before a window ends within it: results are collected a step late.
    if (!capture_ || step < capture_->first()) {
      skip();
      return {};
    }
    timed_ = {timed_ ? timed_->first : step, step};
  }
  KernelSeconds out;
  for (const auto& [name, spent] : kernel_times_.step(totals(), seconds)) {
    if (name.starts_with("linear") || name.starts_with("grouped_linear")) out.gemm += spent;
    if (name.starts_with("attention")) out.attention += spent;
  }
  return out;
}

void StepProfile::skip() {
  kernel_times_.skip(totals());
}

std::string StepProfile::timed_steps() const {
  if (!timed_) return "";
  return timed_->first == timed_->second ? fmt::format("of step {}", timed_->first)
                                         : fmt::format("of steps {}-{}", timed_->first, timed_->second);
}

std::vector<std::pair<std::string, double>> StepProfile::kernels() const {
  const auto entries = ops::kernel_entries(*run_.engine->exec().kernels);
  std::vector<std::pair<std::string, double>> out;
  // Other ranges contain kernels.
  for (auto& kernel : kernel_times_.kernels())
    if (std::any_of(entries.begin(), entries.end(), [&](const auto& e) { return e.name == kernel.first; }))
      out.push_back(std::move(kernel));
  return out;
}

}  // namespace nrl::train
