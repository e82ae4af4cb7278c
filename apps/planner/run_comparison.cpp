#include "apps/planner/run_comparison.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "apps/monitor/run_history.h"
#include "apps/planner/window_rates.h"
#include "apps/profile/json.h"
#include "apps/profile/summary.h"
#include "apps/profile/text.h"
#include "core/base/error.h"
#include "core/base/sample.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::planner {
namespace {

/// Steps at the begin of a file of metrics that are slower than the others: page faults, plans of libraries.
constexpr size_t slow_steps = 2;

std::string required(const std::string& log_dir, const char* name, const char* reason) {
  std::string path = join_path(log_dir, name);
  if (!path_exists(path))
    fail(Exit::no_input, "{}: cannot compare this run: it has no {}. Fix: {}", log_dir, name, reason);
  return path;
}

struct MeasuredMemory {
  int world = 1;
  double arena = 0;  ///< bytes, of the rank with most
};
MeasuredMemory measured_memory(const std::string& log_dir) {
  const JsonValue json =
      read_json(required(log_dir, "memory.json", "wait for the end of the run, which writes it"));
  MeasuredMemory out{.world = static_cast<int>(json.at("ranks").items().size())};
  for (const JsonValue& rank : json.at("ranks").items())
    out.arena = std::max(out.arena, rank.get_double("arena_bytes"));
  if (out.world == 0) fail(Exit::data, "{}memory.json has no ranks", json.where());
  return out;
}

/// Medians of the rows of steps, in seconds; unset: no row has the value.
using Medians = std::map<std::string, double>;
Medians measured_steps(const std::string& log_dir) {
  std::map<std::string, std::vector<double>> values;
  constexpr std::array keys{"step_ms", "comm_ms", "offload_exposed_ms", "data_ms", "gemm_ms", "attention_ms"};
  monitor::for_each_row(log_dir, [&](const JsonValue& row) {
    if (!row.contains("step_ms")) return;
    for (const char* key : keys) values[key].push_back(row.get_double(key, 0));
  });
  if (values.empty()) fail(Exit::data, "{}: metrics.jsonl has no steps yet", log_dir);
  Medians out;
  for (auto& [key, of_steps] : values) {
    if (of_steps.size() > 2 * slow_steps) of_steps.erase(of_steps.begin(), of_steps.begin() + slow_steps);
    out[key] = median(of_steps) * 1e-3;
  }
  return out;
}

double seconds_of(const StageCalls& calls, const machine::CallTimes& times, ops::Work work) {
  double sum = 0;
  for (const ops::Call& call : calls.step.calls)
    if (call.cost.work == work) sum += calls.count(call) * times.of(call).value;
  return sum;
}

}  // namespace

RunComparison compare_with_run(const RunToCompare& request) {
  const std::string& dir = request.log_dir;
  const std::string config = required(dir, "config.yaml", "name logger.log_dir of a run");
  const Medians steps = measured_steps(dir);
  const MeasuredMemory memory = measured_memory(dir);
  PlannedRun run = prepare(
      {.config = config, .world = memory.world, .device = request.device, .profile = request.profile});
  if (!run.complete)
    fail(run.result.exit_code(), "{}: cannot be planned for {}:\n{}", config, counted(memory.world, "rank"),
         render(run.result.diagnostics));
  EstimatedStages stages;
  const RunEstimate estimate = estimate_run(run, &stages);
  if (!estimate.unknown.empty()) fail(Exit::usage, "--predicted needs an estimate: {}", estimate.unknown);
  const predict::StepEstimate& e = estimate.likely;
  RunComparison out{.world = memory.world,
                    .device = std::string(stages.device->model().name),
                    .estimate = e,
                    .without = estimate.without};
  const auto add = [&](std::string name, std::optional<double> predicted, std::optional<double> measured,
                       std::string source) {
    out.parts.push_back({std::move(name), predicted, measured, std::move(source)});
  };
  const char* const metrics = "metrics.jsonl";
  add("step", e.step, steps.at("step_ms"), metrics);
  const StageCalls first = calls_of(*stages.stages, stages.stages->stages().front());
  const machine::CallTimes times = stages.stages->call_times();
  for (const auto& [name, key, work] :
       {std::tuple("GEMMs, rank 0", "gemm_ms", ops::Work::gemm),
        std::tuple("attention, rank 0", "attention_ms", ops::Work::attention)})
    if (steps.at(key) > 0) add(name, seconds_of(first, times, work), steps.at(key), metrics);
  if (out.world > 1)
    add("exposed communication", e.layers + e.data + e.pipeline, steps.at("comm_ms"), metrics);
  if (steps.at("offload_exposed_ms") > 0) add("offload", e.offload, steps.at("offload_exposed_ms"), metrics);
  if (steps.at("data_ms") > 0) add("waiting for data", std::nullopt, steps.at("data_ms"), metrics);
  if (path_exists(join_path(dir, "profile"))) {
    const profile::Profile window = profile::load_profile(dir);
    const profile::Split& s = window.split;
    const std::string source =
        fmt::format("profile of steps {} to {}", window.facts.first_step, window.facts.last_step);
    add("computation", e.compute, s.compute + s.recompute, source);
    add("update", e.update, s.update, source);
    if (out.world > 1) {
      add("layers and data", e.layers + e.data, s.late + s.wire, source);
      if (window.facts.stages > 1) add("bubble", e.pipeline, s.bubble + s.imbalance, source);
    }
    add("host", e.host, gaps_of(s), source);
    WindowRates rates = window_rates(window, *stages.stages, out.device);
    out.profile = std::move(rates.profile);
    out.left_out = std::move(rates.left_out);
  }
  double planned = 0;
  for (const auto& stage : stages.stages->stages())
    planned = std::max(planned, static_cast<double>(stage.engine->plan().memory.total_bytes()));
  out.memory = {"memory of a rank", planned, memory.arena, "memory.json"};
  return out;
}

std::string text_of(const RunComparison& c) {
  const auto number = [](const std::optional<double>& value, double unit) {
    return value ? fmt::format("{:.2f}", *value / unit) : std::string("-");
  };
  std::vector<std::vector<std::string>> rows{
      {"part of a step", "estimated", "measured", "ratio", "measured by"}};
  const auto add = [&](const ComparedPart& p, double unit) {
    const bool both = p.predicted && p.measured && *p.predicted > 0;
    rows.push_back({p.name, number(p.predicted, unit), number(p.measured, unit),
                    both ? fmt::format("{:.2f}", *p.measured / *p.predicted) : "-", p.source});
  };
  for (const ComparedPart& p : c.parts) add(p, 1e-3);
  std::string text = fmt::format("estimate of {} on {}, in ms ({})\n", counted(c.world, "rank"), c.device,
                                 c.estimate.sources());
  text += profile::aligned(rows, 1, true);
  constexpr double mib = 1 << 20;
  text += fmt::format("{}: {} MiB planned, {} MiB allocated\n", c.memory.name,
                      number(c.memory.predicted, mib), number(c.memory.measured, mib));
  for (const std::string& part : c.without) text += fmt::format("without {}\n", part);
  return text;
}

}  // namespace nrl::planner
