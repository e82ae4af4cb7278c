#include "core/config/nsys.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include <fnmatch.h>

#include "core/base/error.h"

namespace nrl {
namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

/// The items of a list with commas, without blanks around them.
std::vector<std::string> items(std::string_view text) {
  std::vector<std::string> out;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    std::string_view item = text.substr(0, comma);
    text.remove_prefix(std::min(comma + 1, text.size()));
    while (item.starts_with(' ')) item.remove_prefix(1);
    while (item.ends_with(' ')) item.remove_suffix(1);
    if (!item.empty()) out.emplace_back(item);
  }
  return out;
}

}  // namespace

std::string NsysWindow::text() const {
  return fmt::format("{}:{}", steps.first, steps.end);
}

bool NsysWindow::has_worker() const {
  return std::any_of(workers.begin(), workers.end(), [](const std::string& pattern) {
    for (const char* name : {"policy_worker", "dtensor_policy_worker", "megatron_policy_worker"})
      if (::fnmatch(pattern.c_str(), name, 0) == 0) return true;
    return false;
  });
}

std::optional<NsysWindow> nsys_window(const ProfilingConfig& config) {
  const std::string steps = variable(nsys_steps_variable), workers = variable(nsys_workers_variable);
  NsysWindow out;
  std::string range;
  if (!steps.empty() || !workers.empty()) {
    if (steps.empty() || workers.empty())
      fail(Exit::usage, "{} is set without {}. Fix: set both, or unset it",
           steps.empty() ? nsys_workers_variable : nsys_steps_variable,
           steps.empty() ? nsys_steps_variable : nsys_workers_variable);
    range = steps;
    out.workers = items(workers);
    out.source = fmt::format("{}={}", nsys_steps_variable, printable(clipped(steps)));
  } else {
    if (!config.nsys.steps) return std::nullopt;
    range = *config.nsys.steps;
    out.workers = config.nsys.workers.empty() ? std::vector<std::string>{"*"} : config.nsys.workers;
    out.source = fmt::format("profiling.nsys.steps: {}", printable(clipped(range)));
  }
  const auto parsed = parse_step_range(range);
  if (!parsed)
    fail(Exit::usage, "{}: expected FIRST:END, counted from 1, END greater than FIRST, for example 2:3",
         out.source);
  out.steps = *parsed;
  return out;
}

bool under_profiler() {
  return !variable("NVTX_INJECTION64_PATH").empty() || !variable("NSYS_PROFILING_SESSION_ID").empty();
}

}  // namespace nrl
