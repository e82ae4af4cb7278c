#include "apps/tune/kernels.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "apps/bench/steps.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/launch/launch.h"
#include "apps/train/start/decide.h"
#include "apps/train/start/run_config.h"
#include "core/base/log.h"
#include "core/base/sample.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"
#include "core/ops/cpu_choice.h"
#include "core/ops/gemm_timings.h"

namespace nrl::tune {
namespace {

/// Kernels in the measurement.
struct KernelChoice {
  std::string name;
  std::vector<std::string> keys;    ///< overrides, and what to write
  std::vector<double> rounds = {};  ///< milliseconds of a step
};

/// Milliseconds of a step that the chosen algorithm gains.
double gain_of(const ops::GemmTiming& t) {
  return static_cast<double>(t.calls) * (t.first_ms - t.best_ms);
}

class KernelTuner {
 public:
  KernelTuner(comm::World& world, const KernelArgs& args)
      : world_(world),
        args_(args),
        overrides_(bench::trial_overrides(args.overrides, bench::trial_warmup + args.steps)),
        steps_(bench::trial_warmup + args.steps) {}

  int run() {
    find();
    for (int round = 0; round < args_.rounds; ++round)
      for (size_t i = 0; i < candidates_.size(); ++i)
        measure(candidates_[(i + static_cast<size_t>(round)) % candidates_.size()]);
    return report();
  }

 private:
  void find() {
    const ConfigResult config =
        train::load_config_collectively(world_, args_.config, overrides_, {.files = false});
    double gpu = train::choose_device(config.config.device).type == DeviceType::cuda ? 1 : 0,
           isa = static_cast<double>(ops::cpu_choice().usable);
    world_.comm().all_reduce(std::span(&gpu, 1), comm::Reduce::min);
    world_.comm().all_reduce(std::span(&isa, 1), comm::Reduce::min);
    if (gpu > 0) {
      candidates_ = {{"library", {"kernels.autotune=false", "kernels.gemm_tuning=null"}},
                     {"timed", {"kernels.autotune=true"}}};
      return;
    }
    for (int i = static_cast<int>(isa); i >= 0; --i) {
      const std::string name(name_of(static_cast<Isa>(i)));
      candidates_.push_back({name, {"kernels.isa=" + name}});
    }
  }

  void measure(KernelChoice& c) {
    std::vector<std::string> all = overrides_;
    all.insert(all.end(), c.keys.begin(), c.keys.end());
    const ConfigResult config = train::load_config_collectively(world_, args_.config, all, {.files = false});
    const train::Placement placement(world_, config);
    std::optional<ops::GemmCounter> counter;
    if (ops::Libraries* const libraries = placement.accelerator().libraries.get())
      counter.emplace(*libraries);
    const bench::Trial trial = bench::time_steps(
        world_, placement, config,
        [&] {
          return train::plan_rank(config, train::load_model_spec(config),
                                  resolve_batch(config.config, world_.size()), placement);
        },
        args_.steps);
    c.rounds.push_back(trial.step_ms);
    if (!counter) return;
    for (ops::GemmTiming& timing : counter->timings()) {
      timing.calls /= steps_;
      gemms_.push_back(std::move(timing));
    }
  }

  int report() {
    if (world_.rank() != 0) return 0;
    std::vector<const KernelChoice*> order;
    for (const KernelChoice& c : candidates_) order.push_back(&c);
    std::stable_sort(order.begin(), order.end(), [](const KernelChoice* a, const KernelChoice* b) {
      return median(a->rounds) < median(b->rounds);
    });
    std::erase_if(gemms_, [](const ops::GemmTiming& g) { return g.best_ms >= g.first_ms; });
    std::stable_sort(gemms_.begin(), gemms_.end(), [](const ops::GemmTiming& a, const ops::GemmTiming& b) {
      return gain_of(a) > gain_of(b);
    });
    const double least = median(order.front()->rounds);
    log::info("  {:<12} {:>12} {:>17} {:>11}", "kernels", "measured ms", "of the rounds", "to the best");
    for (const KernelChoice* c : order) {
      const auto [low, high] = std::minmax_element(c->rounds.begin(), c->rounds.end());
      log::info("  {:<12} {:>12.2f} {:>17} {:>9.1f} %", c->name, median(c->rounds),
                fmt::format("{:.2f} to {:.2f}", *low, *high), 100 * (median(c->rounds) / least - 1));
    }
    if (!gemms_.empty()) {
      log::info("  {:>5} {:>12} {:>9} {:>12}  GEMM", "calls", "library ms", "best ms", "gain ms/step");
      for (const ops::GemmTiming& g : gemms_)
        log::info("  {:>5} {:>12.4f} {:>9.4f} {:>12.3f}  {}", g.calls, g.first_ms, g.best_ms, gain_of(g),
                  g.gemm);
    }
    log::info("use       {}", fmt::join(order.front()->keys, " "));
    if (!args_.json.empty()) write_file_atomic(args_.json, to_json(order).dump() + "\n");
    return 0;
  }

  JsonValue to_json(const std::vector<const KernelChoice*>& order) const {
    std::vector<JsonValue> rows, gemms;
    for (const KernelChoice* c : order)
      rows.push_back(JsonValue::object(
          {{"kernels", c->name},
           {"keys", JsonValue(std::vector<JsonValue>(c->keys.begin(), c->keys.end()))},
           {"measured_ms", JsonValue(std::vector<JsonValue>(c->rounds.begin(), c->rounds.end()))}}));
    for (const ops::GemmTiming& g : gemms_)
      gemms.push_back(JsonValue::object(
          {{"gemm", g.gemm}, {"calls", g.calls}, {"library_ms", g.first_ms}, {"best_ms", g.best_ms}}));
    return JsonValue::object(
        {{"kernels", JsonValue(std::move(rows))}, {"gemms", JsonValue(std::move(gemms))}});
  }

  comm::World& world_;
  const KernelArgs& args_;
  std::vector<std::string> overrides_;
  int64_t steps_;  // of a measurement, with the warm-up
  std::vector<KernelChoice> candidates_;
  std::vector<ops::GemmTiming> gemms_;
};

}  // namespace

int tune_kernels(comm::World& world, const KernelArgs& args) {
  return KernelTuner(world, args).run();
}

}  // namespace nrl::tune
