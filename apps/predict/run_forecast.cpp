#include "apps/predict/run_forecast.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <spdlog/fmt/fmt.h>

#include "apps/machine/call_time.h"
#include "apps/plan/snapshot.h"
#include "apps/predict/goodput.h"
#include "core/base/text.h"

namespace nrl::predict {
namespace {

constexpr double infinite = std::numeric_limits<double>::infinity();
constexpr double hour = 3600, day = 24 * hour, kilowatt_hour = 3.6e6;

/// Sustained by the storage of 16,384 GPUs: 2 TB/s (Llama 3, arXiv:2407.21783, section 3.3.1).
constexpr double storage_of_rank = 0.125e9;
/// Nodes of 8 H100 draw up to 8.4 kW, of which GPUs at their limit take 5.6 (arXiv:2412.08602); less at the
/// average of their fans.
constexpr double gpu_node_watts = 2000;

Interruptions interruptions_of(const FailureConfig& c, const RunFacts& f,
                               const machine::DeviceModel& device) {
  const double storage = c.storage_gb_s ? *c.storage_gb_s * 1e9 : storage_of_rank * f.ranks,
               saving = f.rank_checkpoint * f.ranks / storage,
               copying = f.rank_checkpoint / (device.gpu() ? device.host.bandwidth : device.copy / 2);
  return {.mtbf = c.failures_per_rank_hour > 0 ? hour / (c.failures_per_rank_hour * f.ranks) : infinite,
          .stall = f.snapshots ? copying : saving,
          .lag = f.snapshots ? saving : 0,
          .restart = c.detect_s + c.restart_s + saving};
}

/// Steps between checkpoints; infinite: none before the end of a run whose steps are unknown.
double configured_period(const CheckpointingConfig& c, std::optional<int64_t> steps, double step) {
  double period = steps ? static_cast<double>(*steps) : infinite;
  if (!c.enabled) return period;
  if (c.save_period > 0) period = std::min(period, static_cast<double>(c.save_period));
  if (c.save_seconds) period = std::min(period, std::ceil(*c.save_seconds / step));
  return period;
}

std::string rounded(double value) {
  return value >= 10 ? grouped(std::llround(value)) : fmt::format("{:.2g}", value);
}

JsonValue number(double value) {
  return std::isfinite(value) ? JsonValue(value) : JsonValue(nullptr);
}

}  // namespace

int usual_nodes(const machine::DeviceModel& device, int ranks) {
  return device.gpu() ? (ranks + device.node_ranks - 1) / device.node_ranks : 1;
}

RunFacts run_facts(const Config& c, const plan::RunPlan& plan, const machine::DeviceModel& device, int nodes,
                   double step, const BusySeconds& busy) {
  const int ranks = plan.position.ranks();
  if (nodes == 0) nodes = usual_nodes(device, ranks);
  return {.ranks = ranks,
          .nodes = nodes,
          .step = step,
          .tokens = static_cast<double>(plan.batch.tokens_per_step),
          .busy = busy,
          .rank_checkpoint = static_cast<double>(plan::snapshot_bytes(c, plan)),
          .snapshots = plan::wants_snapshot(c)};
}

RunFacts run_facts(const Config& c, const DryStages& stages, const ModeledDevice& device, int nodes,
                   const StepEstimate& estimate) {
  const machine::CallTimes times(device.model(), device.profile());
  const int all = stages.layout().stages;
  BusySeconds busy{.links = std::max(estimate.busy.node(), estimate.busy.adapter())};
  const plan::RunPlan* saves_most = nullptr;
  for (size_t i = 0; i < stages.stages().size(); ++i) {
    const DryStages::Stage& s = stages.stages()[i];
    const int until = i + 1 < stages.stages().size() ? stages.stages()[i + 1].stage : all;
    const double of_ranks = static_cast<double>(until - s.stage) / all,
                 repeated = static_cast<double>(stages.microbatches()) / s.step.microbatches;
    for (const ops::Call& call : s.step.calls)
      busy.of(call.cost.work) += of_ranks * (call.microbatch < 0 ? 1 : repeated) * times.of(call).value;
    const plan::RunPlan& plan = s.engine->plan();
    if (!saves_most || plan::snapshot_bytes(c, plan) > plan::snapshot_bytes(c, *saves_most))
      saves_most = &plan;
  }
  return run_facts(c, *saves_most, device.model(), nodes, estimate.step, busy);
}

RunForecast forecast_run(const Config& c, const RunFacts& f, const machine::DeviceModel& device) {
  const Interruptions i = interruptions_of(c.cluster.reliability, f, device);
  RunForecast out;
  out.gpu = device.gpu();
  out.steps = resolved_loop(c).max_num_steps;
  out.mtbf = i.mtbf;
  const auto with = [&](double period) { return goodput(period * f.step, i); };
  out.goodput = with(configured_period(c.checkpointing, out.steps, f.step));
  if (std::isfinite(i.mtbf)) {
    // A snapshot is saved before the next one is taken.
    const double least = std::max(1.0, std::ceil(i.lag / f.step)), exact = best_interval(i) / f.step;
    double best = std::max(least, std::floor(exact));
    if (with(best + 1) > with(best)) ++best;
    if (out.steps) best = std::min(best, static_cast<double>(*out.steps));
    out.best_period = static_cast<int64_t>(best);
    out.best_goodput = with(best);
  }
  out.seconds_per_step = f.step / out.goodput;

  const CostConfig& cost = c.cluster.cost;
  std::optional<double> watts = cost.node_watts;
  if (!watts && device.gpu()) watts = gpu_node_watts;
  Spent step{.rank_hours = f.ranks * out.seconds_per_step / hour};
  if (watts)
    step.kwh = step_energy(power_of(device), f.busy, f.step, f.ranks, f.nodes, *watts, cost.pue).total() /
               out.goodput / kilowatt_hour;
  if (cost.rank_hour || (cost.kwh && step.kwh))
    step.price = cost.rank_hour.value_or(0) * step.rank_hours + cost.kwh.value_or(0) * step.kwh.value_or(0);
  const auto times = [&](double n) {
    Spent s{.rank_hours = step.rank_hours * n};
    if (step.kwh) s.kwh = *step.kwh * n;
    if (step.price) s.price = *step.price * n;
    return s;
  };
  out.per_token = times(1 / f.tokens);
  out.total = times(static_cast<double>(out.steps.value_or(0)));
  return out;
}

std::string RunForecast::text() const {
  const std::string failures =
      std::isinf(mtbf) ? "" : fmt::format("a failure every {} h", rounded(mtbf / hour));
  if (goodput == 0) return failures + " and no checkpoint before the end: the run does not end";
  constexpr double billion = 1e9;
  const Spent spent =
      steps ? total
            : Spent{.rank_hours = per_token.rank_hours * billion,
                    .kwh = per_token.kwh ? std::optional(*per_token.kwh * billion) : std::nullopt,
                    .price = per_token.price ? std::optional(*per_token.price * billion) : std::nullopt};
  std::string text =
      steps ? fmt::format("{} steps in {} with goodput {:.1f} %", grouped(*steps),
                          seconds() < day ? human_duration(seconds()) : rounded(seconds() / day) + " days",
                          100 * goodput)
            : fmt::format("10^9 tokens with goodput {:.1f} %", 100 * goodput);
  if (best_period)
    text += fmt::format(" ({}; best save_period {} steps: {:.1f} %)", failures, grouped(*best_period),
                        100 * best_goodput);
  text += fmt::format("   {} {} hours", rounded(spent.rank_hours), gpu ? "GPU" : "rank");
  if (spent.kwh)
    text += *spent.kwh >= 1e4 ? fmt::format("   {} MWh", rounded(*spent.kwh / 1000))
                              : fmt::format("   {} kWh", rounded(*spent.kwh));
  if (spent.price) text += fmt::format("   price {}", rounded(*spent.price));
  return text;
}

JsonValue RunForecast::json() const {
  const auto spent = [](const Spent& s, double factor) {
    const auto or_null = [&](const std::optional<double>& v) { return v ? number(*v * factor) : nullptr; };
    return JsonValue::object({{"rank_hours", number(s.rank_hours * factor)},
                              {"kwh", or_null(s.kwh)},
                              {"price", or_null(s.price)}});
  };
  JsonValue out = JsonValue::object({{"steps", steps ? JsonValue(*steps) : nullptr},
                                     {"days", steps ? number(seconds() / day) : nullptr},
                                     {"goodput", goodput},
                                     {"hours_between_failures", number(mtbf / hour)},
                                     {"best_save_period", best_period ? JsonValue(*best_period) : nullptr},
                                     {"best_goodput", best_period ? JsonValue(best_goodput) : nullptr},
                                     {"total", steps ? spent(total, 1) : nullptr},
                                     {"per_billion_tokens", spent(per_token, 1e9)}});
  return out;
}

}  // namespace nrl::predict
