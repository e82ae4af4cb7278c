#include "apps/train/loop/save_requests.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/config/time_span.h"
#include "core/io/atomic_file.h"

namespace nrl::train {
namespace {

constexpr double look_every = 1;  // seconds
// The launcher and the file system need the last seconds of a job.
constexpr double job_end_margin = 30;

// On the steady clock: the end that Slurm has set for this job.
std::optional<double> job_end() {
  const char* text = std::getenv("SLURM_JOB_END_TIME");
  int64_t end = 0;
  if (!text) return std::nullopt;
  const auto [rest, error] = std::from_chars(text, text + std::strlen(text), end);
  if (error != std::errc() || *rest != '\0' || end <= 0) return std::nullopt;
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  return steady_seconds() + (static_cast<double>(end) - now.count()) - job_end_margin;
}

std::optional<double> deadline(const CheckpointingConfig& c) {
  if (!c.enabled) return std::nullopt;
  std::optional<double> first = job_end();
  if (c.checkpoint_must_save_by) {
    const auto span = parse_time_span(*c.checkpoint_must_save_by);
    const double end = steady_seconds() + static_cast<double>(span.value());
    first = std::min(first.value_or(end), end);
  }
  return first;
}

}  // namespace

void SaveTimes::saved(double now, double seconds) {
  saved_ = now;
  longest_save_ = std::max(longest_save_, seconds);
  has_looked_ = false;
}

void SaveTimes::look(double now) {
  if (has_looked_) longest_step_ = std::max(longest_step_, now - looked_);
  looked_ = now;
  has_looked_ = true;
}

SaveRequests::SaveRequests(const Config& config, bool active)
    : active_(active),
      log_dir_(config.logger.log_dir),
      times_(config.checkpointing.enabled ? config.checkpointing.save_seconds : std::nullopt,
             active ? deadline(config.checkpointing) : std::nullopt, steady_seconds()) {
  if (!active) return;
  for (const char* name : {save_file, stop_file}) (void)take(name);
}

bool SaveRequests::take(const char* name) const {
  const std::string path = join_path(log_dir_, name);
  if (!path_exists(path)) return false;
  try {
    remove_tree(path);
  } catch (const Error& e) {
    log::warn("{} is a request that cannot be removed, and is ignored: {}", path, e.what());
    return false;
  }
  return true;
}

SaveRequests::Asked SaveRequests::look() {
  if (!active_) return {};
  const double now = steady_seconds();
  times_.look(now);
  if (!stops_ && times_.stop_due()) {
    stops_ = true;
    log::info(
        "the run stops, to have its checkpoint before its time is over "
        "(checkpointing.checkpoint_must_save_by, SLURM_JOB_END_TIME)");
  }
  Asked asked{.save = times_.save_due()};
  if (now >= next_look_) {
    next_look_ = now + look_every;
    asked.save = take(save_file) || asked.save;
    stops_ = take(stop_file) || stops_;
  }
  asked.stop = stops_;
  return asked;
}

void SaveRequests::saved(double seconds) {
  times_.saved(steady_seconds(), seconds);
}

}  // namespace nrl::train
