#include "apps/planner/advice.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "apps/plan/nodes.h"
#include "apps/planner/gemm_times.h"
#include "apps/planner/window_rates.h"
#include "apps/predict/step_time.h"
#include "apps/profile/summary.h"
#include "apps/profile/verdicts.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/start/run_check.h"
#include "core/base/error.h"
#include "core/config/load.h"

namespace nrl::planner {
namespace {

constexpr double least_gain = 0.01;

// The model of the device that the profile is of; null: unknown. CPUs are modeled by this machine's.
const machine::DeviceModel* gpu_of(const std::string& device) {
  for (const char* name : {"b200", "h200", "h100", "a100"}) {
    const machine::DeviceModel* const model = &machine::find_device_model("device", name);
    if (device.find(model->product) != std::string::npos) return model;
  }
  return nullptr;
}

class Pricing {
 public:
  Pricing(const profile::Profile& profile, const ConfigResult& config)
      : profile_(profile), tf32_(config.config.kernels.tf32) {
    const Config& c = config.config;
    const std::vector<int> local = plan::local_sizes(c, profile.facts.world);
    const int threads =
        profile.facts.threads > 0 ? profile.facts.threads : train::threads_for(c.kernels, local.front());
    const std::string& name = profile.ranks.front().device;
    const machine::DeviceModel* gpu = name == "cpu" ? nullptr : gpu_of(name);
    if (name != "cpu" && !gpu) return;
    const machine::DeviceModel model =
        with_links(gpu ? *gpu : machine::measure_cpu_model(local.front(), threads));
    device_ = std::make_unique<predict::ModeledDevice>(model, tf32_, threads);
    std::optional<predict::DryStages> now = stages({});
    if (!now) return;
    // Calls that the profile has no times of are as much slower than the model as the others.
    const double busy = profile::utilization(profile.split) * profile.split.wall,
                 computing = now->estimate().computing();
    WindowRates rates = window_rates(profile, *now, std::string(model.name));
    activations_ = activations_of(*now);
    now.reset();  // it refers to the device
    const machine::DeviceModel own = busy > 0 && computing > 0 ? slowed(model, busy / computing) : model;
    rates_ = std::move(rates.profile);
    copy_ = model.copy;
    device_ = std::make_unique<predict::ModeledDevice>(own, tf32_, threads, rates_);
    if (!gpu) gemms_ = std::make_unique<GemmTimes>(c.kernels, threads);
  }

  /// The step with these overrides; unset if they are refused or do not fit.
  std::optional<predict::StepEstimate> estimate(const std::vector<std::string>& overrides) {
    std::optional<predict::DryStages> then = stages(overrides);
    if (!then) return std::nullopt;
    const double kept = kept_traffic(*then);
    bool added = false;
    if (gemms_)
      for (const predict::DryStages::Stage& stage : then->stages())
        added |= add_gemms(stage.step.calls, *gemms_, rates_);
    const auto estimated = [&](const predict::DryStages& of) {
      predict::StepEstimate e = of.estimate();
      e.compute += kept;
      e.step += kept;
      return e;
    };
    if (!added) return estimated(*then);
    then.reset();  // it refers to the device
    device_ = std::make_unique<predict::ModeledDevice>(device_->model(), tf32_, device_->threads(), rates_);
    return estimated(*stages(overrides));
  }

 private:
  std::optional<predict::DryStages> stages(const std::vector<std::string>& overrides) const {
    if (!device_) return std::nullopt;
    ConfigResult config = load_config_text(profile_.facts.config, "profile.json", overrides);
    if (!config.ok()) return std::nullopt;
    const int world = profile_.facts.world;
    try {
      const std::vector<ClusterNode> nodes = plan::configured_nodes(config.config, world);
      const std::optional<model::ModelSpec> spec =
          train::check_but_memory(config, {.world = world, .nodes = nodes, .files = false});
      if (!config.ok()) return std::nullopt;
      const double capacity = config.config.memory.max_memory * device_->model().memory;
      plan::StagePlans plans = predict::plan_stages(config.config, *spec, world, *device_, capacity);
      if (static_cast<double>(plans.memory()) > capacity) return std::nullopt;
      return predict::DryStages(config.config, std::move(plans), *device_, nodes);
    } catch (const Error&) {
      return std::nullopt;  // what a run would refuse at its start
    }
  }

  static double activations_of(const predict::DryStages& stages) {
    int64_t most = 0;
    for (const predict::DryStages::Stage& stage : stages.stages())
      most = std::max(most, stage.engine->plan().memory.bytes(memory::Category::activations));
    return static_cast<double>(most);
  }
  /// On a CPU: seconds in which activations are written and read that leave the caches now and did not
  /// before. The profile's times are of calls that found their operands there.
  double kept_traffic(const predict::DryStages& then) const {
    if (!gemms_ || activations_ > static_cast<double>(machine::processor_cache())) return 0;
    return std::max(0.0, activations_of(then) - activations_) * 2 / copy_;
  }

  /// The links at the rates that the profile has.
  machine::DeviceModel with_links(machine::DeviceModel model) const {
    double bytes = 0, seconds = 0, calls = 0, latency = 0;
    for (const profile::GroupTime& g : profile::slowest(profile_).groups) {
      // A message counts from its issue on: it may wait for a whole stage.
      if (g.operation == "send" || g.operation == "recv") continue;
      bytes += g.wire_bytes;
      seconds += g.wire;
      calls += static_cast<double>(g.calls);
      latency = std::max(latency, g.latency);
    }
    if (bytes <= 0 || seconds < 1e-4) return model;
    machine::LinkModel& link = profile_.facts.nodes > 1 ? model.network : model.node;
    constexpr double most = 0.8;  // of the time, for latency
    latency = std::min(latency, most * seconds / calls);
    if (latency > 0) link.latency = latency;
    // The time of a few bytes is none of their bandwidth.
    if (bytes > 1 << 20) link.bandwidth = bytes / (seconds - calls * latency);
    return model;
  }

  static machine::DeviceModel slowed(machine::DeviceModel model, double factor) {
    for (double* rate : {&model.copy, &model.f32_flops, &model.tf32_flops}) *rate /= factor;
    if (model.gpu()) model.gemm /= factor;
    return model;
  }

  const profile::Profile& profile_;
  bool tf32_;
  machine::Profile rates_;
  double activations_ = 0, copy_ = 1;  // bytes of the present plan; bytes/s read and written
  std::unique_ptr<GemmTimes> gemms_;   // of a CPU
  std::unique_ptr<predict::ModeledDevice> device_;
};

bool outside_model(const std::string& type) {
  return type == "data_loading" || type == "exposed_offloading" || type == "unsteady_steps" ||
         type == "straggler" || type == "starved";
}

/// Gives a finding the candidates that gain most, of which `changes_numbers` says what they change.
class Choice {
 public:
  Choice(Pricing& pricing, double now, double wall) : pricing_(pricing), now_(now), wall_(wall) {}

  void choose(profile::Finding& f, const std::vector<profile::Candidate>& candidates, bool changes_numbers) {
    double best = (1 - least_gain) * wall_;  // the first of equal ones counts
    for (const profile::Candidate& c : candidates) {
      if (c.changes_numbers != changes_numbers) continue;
      const bool modeled = c.predicted_s == 0 && !outside_model(f.type);
      if (!modeled && c.predicted_s == 0 && (f.predicted_s > 0 || !f.overrides.empty())) continue;
      const auto then = c.overrides.empty() ? predict::StepEstimate{} : pricing_.estimate(c.overrides);
      if (!then || (modeled && now_ <= 0)) continue;
      // Time that the model does not explain stays; a model of more than was measured counts in proportion.
      const double predicted =
          modeled ? wall_ - (now_ - then->step) * std::min(1.0, wall_ / now_) : c.predicted_s;
      if (predicted >= best) continue;
      f.overrides = c.overrides;
      f.changes_numbers = c.changes_numbers;
      // No more than what the cause costs.
      f.predicted_s = modeled ? std::max(predicted, wall_ - f.seconds) : predicted;
      if (modeled) f.model_error = std::abs(now_ / wall_ - 1);
      if (predicted > 0) best = predicted;
    }
  }

 private:
  Pricing& pricing_;
  double now_, wall_;
};

/// Seconds that a finding promises; 0: it says only how things are.
double gain(const profile::Finding& f, double wall) {
  return f.predicted_s > 0 ? wall - f.predicted_s : f.overrides.empty() ? 0 : f.seconds;
}

}  // namespace

void advise(profile::Profile& profile) {
  const ConfigResult config = load_config_text(profile.facts.config, "profile.json");
  const double wall = profile.split.wall;
  if (!config.ok() || wall <= 0) return;
  std::vector<profile::Verdict> verdicts = profile::find_verdicts(profile, config.config);
  profile.findings.clear();
  std::optional<Pricing> pricing;
  double now = 0;
  for (profile::Verdict& v : verdicts) {
    profile::Finding& f = v.finding;
    if (!v.candidates.empty() && !pricing) {
      pricing.emplace(profile, config);
      if (const auto estimate = pricing->estimate({})) now = estimate->step;
    }
    if (pricing) {
      Choice choice(*pricing, now, wall);
      choice.choose(f, v.candidates, false);
      // Nothing else helps.
      if (f.overrides.empty()) choice.choose(f, v.candidates, true);
    }
    profile.findings.push_back(std::move(f));
  }
  std::stable_sort(profile.findings.begin(), profile.findings.end(),
                   [&](const auto& a, const auto& b) { return gain(a, wall) > gain(b, wall); });
}

}  // namespace nrl::planner
