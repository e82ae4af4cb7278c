#include "apps/tune/tune_lr.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "apps/monitor/chart.h"
#include "apps/train/launch/launch.h"
#include "apps/train/loop/lr_schedule.h"
#include "apps/train/loop/reference.h"
#include "apps/train/loop/step_source.h"
#include "apps/train/start/run_config.h"
#include "apps/train/start/run_data.h"
#include "apps/train/start/run_setup.h"
#include "apps/tune/lr_range.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::tune {
namespace {

constexpr int chart_width = 72, chart_height = 12;
constexpr double most_shown = 1.5;  // times the first loss

/// A directory for the lock of the run, which must not be the log of a run that trains; removed at the end.
class OwnLog {
 public:
  OwnLog() : path_((std::filesystem::temp_directory_path() / ("nrl-tune-" + random_nonce())).string()) {}
  ~OwnLog() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  OwnLog(const OwnLog&) = delete;
  OwnLog& operator=(const OwnLog&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Keys that a range test does not read, and those that it sets itself.
std::vector<std::string> own_overrides(const LrArgs& args, const std::string& log) {
  static constexpr std::string_view unused[] = {"checkpointing", "profiling", "policy.scheduler"};
  std::vector<std::string> out = default_overrides(unused);
  for (std::string& ours : train::steps_only_overrides(args.steps)) out.push_back(std::move(ours));
  out.insert(out.end(), {"logger.log_dir=" + log, "policy.scheduler.lr_decay_style=constant"});
  return out;
}

/// The losses by learning rate, until they diverge.
std::vector<LrPoint> measure(train::Run& run, const LrArgs& args) {
  engine::Engine& engine = *run.engine;
  const std::unique_ptr<train::StepSource> source =
      train::training_source(run.config, run.train, run.plan(), run.placement.groups(), 0, run.max_steps());
  std::vector<LrPoint> points;
  SmoothedLoss smoothed;
  double best = INFINITY;
  for (int64_t s = 1; s <= run.max_steps(); ++s) {
    const train::FilledStep filled = train::fill_step(engine, *source);
    const double lr = range_lr(args.from, args.to, s, args.steps);
    engine.step(
        {.number = s, .learning_rate = lr, .loss_tokens = std::max<int64_t>(filled.totals.loss_tokens, 1)},
        engine.objective());
    const engine::StepResult result = train::collect_step(run.world, engine);
    run.placement.groups().check();
    const double loss = engine.objective().loss(result.metrics, filled.totals.counts());
    if (!std::isfinite(loss)) break;
    points.push_back({lr, loss});
    const double now = smoothed.add(loss);
    best = std::min(best, now);
    if (diverged(now, best)) break;
  }
  engine.finish_gathers();
  return points;
}

monitor::RunHistory history_of(std::span<const LrPoint> points, const std::string& name) {
  monitor::RunHistory h;
  h.name = name;
  h.loss.key = "loss", h.lr.key = "lr";
  for (const LrPoint& p : points) {
    if (p.loss > most_shown * points.front().loss) break;  // it would hide the fall
    h.last_step = ++h.rows;
    h.loss.points.push_back({h.rows, p.loss});
    h.lr.points.push_back({h.rows, p.lr});
  }
  return h;
}

JsonValue to_json(std::span<const LrPoint> points, const std::optional<LrSuggestion>& found) {
  std::vector<JsonValue> rows;
  for (const LrPoint& p : points) rows.push_back(JsonValue::object({{"lr", p.lr}, {"loss", p.loss}}));
  JsonValue out = JsonValue::object({{"points", JsonValue(std::move(rows))}});
  if (!found) return out;
  out.set("steepest_lr", points[found->steepest].lr);
  out.set("turn_lr", points[found->turn].lr);
  out.set("largest_lr", found->largest);
  return out;
}

void print(std::span<const LrPoint> points, const LrSuggestion& found, const train::Run& run) {
  const auto at = [&](size_t i) { return fmt::format("{:.2e} (step {})", points[i].lr, i + 1); };
  log::info("steepest  {}: the loss falls most", at(found.steepest));
  log::info("largest   {:.2e}: a tenth of {}, {}", found.largest, at(found.turn),
            found.turned ? "from which the loss rises" : "the end of the range; give a larger --to");
  const LrScalingConfig& scaling = run.config.policy.optimizer.lr_scaling;
  const double scale = train::scaled_lr(1, scaling.rule, run.plan().batch.global, scaling.base_batch_size);
  log::info("use       policy.optimizer.lr={:.2g}{}", found.largest / scale,
            scale == 1 ? ""
                       : fmt::format("  (times {:.3g} by lr_scaling for batches of {})", scale,
                                     run.plan().batch.global));
  log::info(
      "note      a range test sees the first steps only; a warm-up allows more, and a run needs a decay");
}

}  // namespace

int tune_lr(comm::World& world, const LrArgs& args) {
  const bool first = world.rank() == 0;
  if (args.from >= args.to) fail(Exit::usage, "--from {:g} must be below --to {:g}", args.from, args.to);
  const OwnLog own;
  std::vector<std::string> overrides = args.overrides;
  for (const std::string& ours : own_overrides(args, own.path())) overrides.push_back(ours);
  const ConfigResult config = train::load_config_collectively(world, args.config, overrides);
  monitor::StartPhases phases;
  const std::unique_ptr<train::Run> run = train::set_up_run(world, config, phases);
  train::prepare_references(*run, phases);
  if (first)
    log::info("range     {} steps of {} sequences, lr {:.2g} to {:.2g}", args.steps, run->plan().batch.global,
              args.from, args.to);
  const std::vector<LrPoint> points = measure(*run, args);
  const std::optional<LrSuggestion> found = suggest(points);
  const int code = static_cast<int>(found ? Exit::ok : Exit::diverged);
  const monitor::RunHistory history = history_of(points, args.config);
  train::run_collectively(world, [&] {
    if (!first) return;
    if (!args.json.empty()) write_file_atomic(args.json, to_json(points, found).dump() + "\n");
    if (!args.html.empty()) write_file_atomic(args.html, monitor::html_report({&history, 1}));
  });
  if (!first) return code;
  log::info("{}", monitor::text_chart({&history, 1}, &monitor::RunHistory::loss, chart_width, chart_height));
  if (static_cast<int64_t>(points.size()) < args.steps)
    log::info("stopped   after step {}: the loss diverges", points.size());
  if (found) {
    print(points, *found, *run);
    return code;
  }
  log::error_text(
      fmt::format("the loss never falls in {} between lr {:.2g} and {:.2g}. Fix: a smaller --from, more "
                  "--steps, or other data",
                  counted(points.size(), "step"), args.from, args.to));
  return code;
}

}  // namespace nrl::tune
