#include "apps/train/loop/step_profile.h"

#include <algorithm>
#include <utility>

#include "apps/profile/compare.h"
#include "apps/train/loop/profile_files.h"
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
  trace::start(run.engine->exec().device ? trace::Mode::off : trace::Mode::totals);
}

StepProfile::~StepProfile() {
  capture_.reset();
  trace::detach_device();
}

void StepProfile::begin_step(int64_t step) {
  if (!capture_ && steps_.contains(step)) {
    const int64_t left = run_.max_steps() - step + 1;
    capture_ = std::make_unique<Capture>(run_, step, std::min(steps_.from(step), left), calls_);
    kernel_times_.restart();
  }
  if (capture_) capture_->begin_step();
}

bool StepProfile::ends_with(int64_t step, bool interrupted) const {
  return capture_ && (interrupted || !steps_.contains(step + 1) || steps_.from(step) == 1);
}

StepProfile::Written StepProfile::write() {
  const profile::Recorded record = capture_->finish();
  capture_.reset();
  if (run_.engine->exec().device) kernel_times_.restart();  // the totals were cleared
  WrittenProfile written = write_profile(run_, record);
  Written out{.directory = written.directory};
  if (run_.config.monitoring.analysis.performance_regression && run_.world.rank() == 0)
    out.regression = regression_of(std::move(written.merged));
  // Timelines are large: only the last one of many windows keeps them.
  if (run_.config.profiling.every && !last_.empty()) remove_timelines(run_, last_);
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
