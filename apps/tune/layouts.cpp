#include "apps/tune/layouts.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "apps/bench/steps.h"
#include "apps/machine/device_models.h"
#include "apps/plan/nodes.h"
#include "apps/planner/search.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/launch/launch.h"
#include "apps/train/start/decide.h"
#include "apps/train/start/run_check.h"
#include "apps/train/start/run_config.h"
#include "core/base/log.h"
#include "core/base/sample.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::tune {
namespace {

/// A layout in the measurement.
struct Candidate {
  std::string name;
  std::vector<std::string> overrides;  ///< to the configuration as given
  std::vector<std::string> keys;       ///< to write into it
  double estimated = 0;                ///< seconds of a step
  int64_t tokens = 0;                  ///< of a step
  std::vector<double> rounds;          ///< milliseconds of a step
  std::string refused;                 ///< why it was not measured; empty: it was
};

class LayoutTuner {
 public:
  LayoutTuner(comm::World& world, const LayoutArgs& args)
      : world_(world),
        args_(args),
        overrides_(bench::trial_overrides(args.overrides, bench::trial_warmup + args.steps)) {}

  int run() {
    find();
    for (int round = 0; round < args_.rounds; ++round)
      for (size_t i = 0; i < candidates_.size(); ++i)
        measure(candidates_[(i + static_cast<size_t>(round)) % candidates_.size()]);
    return report();
  }

 private:
  bool first() const { return world_.rank() == 0; }

  /// The configuration with a candidate's overrides; unset on all ranks if it is refused.
  std::optional<ConfigResult> load(Candidate& c) {
    std::vector<std::string> all = overrides_;
    all.insert(all.end(), c.overrides.begin(), c.overrides.end());
    Diagnostics found;
    std::optional<ConfigResult> config =
        train::try_config_collectively(world_, args_.config, all, {.files = false}, found);
    if (!config && first())
      for (const Diagnostic& d : found)
        if (c.refused.empty() && d.severity == Severity::error) c.refused = d.message;
    if (!config && c.refused.empty()) c.refused = "refused";
    return config;
  }

  /// Rank 0 searches; all ranks get the overrides of the best layouts.
  void find() {
    const ConfigResult config =
        train::load_config_collectively(world_, args_.config, overrides_, {.files = false});
    const Config& c = config.config;
    const int local = plan::local_sizes(c, world_.size()).front();
    const int threads = train::threads_for(c.kernels, local);
    std::string text;
    train::run_collectively(world_, [&] {
      if (!first()) return;
      if (train::choose_device(c.device).type == DeviceType::cuda)
        fail(Exit::usage, "tune layout measures on the CPU. Fix: device=cpu, or plan --search --device NAME");
      const predict::ModeledDevice device(machine::measure_cpu_model(local, threads), c.kernels.tf32,
                                          threads);
      const planner::Result result =
          planner::search_layouts({.config = args_.config,
                                   .overrides = overrides_,
                                   .world = world_.size(),
                                   .capacity = c.memory.max_memory * device.model().memory},
                                  device);
      log::info("search    {} of {} fit", result.tried - result.too_large,
                counted(static_cast<int64_t>(result.tried), "layout"));
      std::vector<JsonValue> rows;
      const auto add = [&](const std::string& name, const std::vector<std::string>& overrides,
                           const std::vector<std::string>& keys, double estimated, int64_t tokens) {
        const auto list = [](const std::vector<std::string>& of) {
          return JsonValue(std::vector<JsonValue>(of.begin(), of.end()));
        };
        rows.push_back(JsonValue::object({{"name", name},
                                          {"overrides", list(overrides)},
                                          {"keys", list(keys)},
                                          {"estimated", estimated},
                                          {"tokens", tokens}}));
      };
      const predict::StepEstimate now =
          predict::estimate_step(c,
                                 predict::plan_stages(c, train::load_model_spec(config), world_.size(),
                                                      device, c.memory.max_memory * device.model().memory),
                                 device, {});
      add("configured", {}, {}, now.step, resolve_batch(c, world_.size()).tokens_per_step);
      for (const planner::Found& f : result.found) {
        if (static_cast<int>(rows.size()) > args_.measure) break;
        add(f.layout.name(world_.size()), f.layout.overrides(), f.keys, f.estimate.step, f.tokens);
      }
      text = JsonValue(std::move(rows)).dump();
    });
    world_.comm().broadcast_text(text, 0);
    const JsonValue rows = parse_json(text, "layouts");
    for (const JsonValue& row : rows.items()) {
      const auto list = [&](const char* key) {
        std::vector<std::string> out;
        for (const JsonValue& v : row.at(key).items()) out.push_back(v.as_string());
        return out;
      };
      candidates_.push_back({.name = row.get_string("name"),
                             .overrides = list("overrides"),
                             .keys = list("keys"),
                             .estimated = row.get_double("estimated"),
                             .tokens = row.get_int("tokens"),
                             .rounds = {},
                             .refused = {}});
    }
  }

  void measure(Candidate& c) {
    if (!c.refused.empty()) return;
    const std::optional<ConfigResult> config = load(c);
    if (!config) return;
    const train::Placement placement(world_, *config);
    const bench::Trial trial = bench::time_steps(
        world_, placement, *config,
        [&] {
          return train::plan_rank(*config, train::load_model_spec(*config),
                                  resolve_batch(config->config, world_.size()), placement);
        },
        args_.steps);
    c.rounds.push_back(trial.step_ms);
  }

  int report() {
    std::vector<const Candidate*> order;
    for (const Candidate& c : candidates_)
      if (!c.rounds.empty()) order.push_back(&c);
    if (order.empty()) fail(Exit::config, "no layout could be measured: {}", candidates_.front().refused);
    std::stable_sort(order.begin(), order.end(), [](const Candidate* a, const Candidate* b) {
      return median(a->rounds) < median(b->rounds);
    });
    train::run_collectively(world_, [&] {
      if (first() && !args_.json.empty()) write_file_atomic(args_.json, to_json(order).dump() + "\n");
    });
    if (!first()) return 0;
    size_t width = 6;
    for (const Candidate& c : candidates_) width = std::max(width, c.name.size());
    log::info("  {:<{}} {:>12} {:>12} {:>17} {:>7} {:>11}", "layout", width, "predicted ms", "measured ms",
              "of the rounds", "error", "tokens/s");
    for (const Candidate* c : order) {
      const double ms = median(c->rounds);
      const auto [least, most] = std::minmax_element(c->rounds.begin(), c->rounds.end());
      log::info("  {:<{}} {:>12.1f} {:>12.1f} {:>17} {:>5.0f} % {:>11}", c->name, width, c->estimated * 1e3,
                ms, fmt::format("{:.1f} to {:.1f}", *least, *most), 100 * (c->estimated * 1e3 / ms - 1),
                grouped(std::llround(static_cast<double>(c->tokens) / ms * 1e3)));
    }
    for (const Candidate& c : candidates_)
      if (!c.refused.empty()) log::info("  {:<{}} not measured: {}", c.name, width, c.refused);
    const Candidate& best = *order.front();
    log::info("use       {}", best.keys.empty() ? "the configuration as it is"
                                                : fmt::format("{}", fmt::join(best.keys, " ")));
    return 0;
  }

  static JsonValue to_json(const std::vector<const Candidate*>& order) {
    std::vector<JsonValue> rows;
    for (const Candidate* c : order)
      rows.push_back(JsonValue::object(
          {{"layout", c->name},
           {"keys", JsonValue(std::vector<JsonValue>(c->keys.begin(), c->keys.end()))},
           {"predicted_ms", c->estimated * 1e3},
           {"measured_ms", JsonValue(std::vector<JsonValue>(c->rounds.begin(), c->rounds.end()))},
           {"tokens", c->tokens}}));
    return JsonValue::object({{"layouts", JsonValue(std::move(rows))}});
  }

  comm::World& world_;
  const LayoutArgs& args_;
  std::vector<std::string> overrides_;
  std::vector<Candidate> candidates_;  // the configured one first
};

}  // namespace

int tune_layout(comm::World& world, const LayoutArgs& args) {
  return LayoutTuner(world, args).run();
}

}  // namespace nrl::tune
