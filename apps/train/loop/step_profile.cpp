#include "apps/train/loop/step_profile.h"

#include <algorithm>
#include <utility>

#include "core/io/atomic_file.h"
#include "core/ops/coverage.h"
#include "core/ops/kernel_table.h"
#include "core/trace/device_timeline.h"

namespace nrl::train {

StepProfile::StepProfile(Run& run) : run_(run) {
  if (run.config.profiling.enabled) steps_ = parse_step_range(run.config.profiling.steps);
  record(trace::Mode::totals);
}

StepProfile::~StepProfile() {
  trace::detach_device();
}

void StepProfile::record(trace::Mode mode) {
  const ops::Exec& e = run_.engine->exec();
  if (e.device && mode != trace::Mode::timeline) {
    trace::detach_device();
    mode = trace::Mode::off;
  }
  trace::start(mode);
  if (e.device && mode == trace::Mode::timeline) trace::attach_device(*e.device, e.stream);
  kernel_times_.restart();
}

void StepProfile::begin_step(int64_t step) {
  if (steps_ && step == steps_->first) record(trace::Mode::timeline);
}

bool StepProfile::ends_with(int64_t step, bool last) const {
  return steps_ && step >= steps_->first && (step + 1 == steps_->end || last);
}

std::string StepProfile::write() {
  const int rank = run_.world.rank();
  const std::string path = join_path(run_.config.logger.log_dir, fmt::format("trace-rank-{}.json", rank));
  trace::write_chrome_trace(path, rank);
  steps_.reset();
  record(trace::Mode::totals);
  return path;
}

monitor::KernelTimes::Totals StepProfile::totals() const {
  monitor::KernelTimes::Totals out;
  for (const trace::Total& total : run_.engine->exec().device ? trace::device_totals() : trace::totals())
    out.emplace(total.name, total.seconds);
  return out;
}

StepProfile::KernelSeconds StepProfile::end_step(int64_t step, double seconds) {
  if (run_.engine->exec().device) {
    // The step before the trace ends within it: results are collected a step late.
    if (!steps_ || step < steps_->first) {
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
