#include "apps/train/step_profile.h"

#include <algorithm>

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
  taken_ = {};
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

std::vector<trace::Total> StepProfile::totals() const {
  return run_.engine->exec().device ? trace::device_totals() : trace::totals();
}

StepProfile::KernelSeconds StepProfile::take() {
  KernelSeconds now;
  for (const trace::Total& total : totals()) {
    if (total.name.starts_with("linear") || total.name.starts_with("grouped_linear"))
      now.gemm += total.seconds;
    if (total.name.starts_with("attention")) now.attention += total.seconds;
  }
  const KernelSeconds spent{now.gemm - taken_.gemm, now.attention - taken_.attention};
  taken_ = now;
  return spent;
}

std::vector<std::pair<std::string, double>> StepProfile::kernels() const {
  const auto entries = ops::kernel_entries(*run_.engine->exec().kernels);
  std::vector<std::pair<std::string, double>> out;
  // Other ranges contain kernels.
  for (const trace::Total& total : totals())
    if (std::any_of(entries.begin(), entries.end(), [&](const auto& e) { return e.name == total.name; }))
      out.emplace_back(total.name, total.seconds);
  return out;
}

}  // namespace nrl::train
