#include "apps/train/effect_check.h"

#include <algorithm>
#include <cstdlib>

#include "apps/plan/recompute.h"
#include "apps/plan/run_plan.h"
#include "apps/train/device_choice.h"
#include "apps/train/memory_fit.h"
#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/device/cpu/features.h"

namespace nrl::train {

void check_threads_variable(const ConfigResult& result, Diagnostics& out) {
  constexpr std::string_view key = "kernels.num_threads";
  if (!result.config.kernels.num_threads.is_auto() || !result.sound(key)) return;
  const auto invalid = cpu::omp_num_threads().invalid;
  if (!invalid) return;
  out.push_back(diagnose(
      result, key,
      fmt::format("OMP_NUM_THREADS is \"{}\", which is ignored: expected a number from 1 to {}, or a list of "
                  "them (\"4,2\"), of which the first counts",
                  printable(clipped(*invalid, 80)), max_threads),
      "", {"Fix: correct or unset it, or set kernels.num_threads"}, Severity::warning));
}

void check_profiler_variables(Diagnostics& out) {
  const auto refuse = [&](const char* name, std::string why, const auto& replacement) {
    const char* value = std::getenv(name);
    if (!value || !*value) return;
    Diagnostic d;
    d.file = fmt::format("environment: {}={}", name, value);
    d.message = fmt::format("{} is set, but {}", name, why);
    d.notes = {fmt::format("Fix: unset {}, and {}", name, replacement(value)),
               "nsys profile --trace=cuda,nvtx nrl-train CONFIG records a whole run"};
    out.push_back(std::move(d));
  };
  refuse("NRL_NSYS_PROFILE_STEP_RANGE", "nrl-train does not start and stop Nsight Systems at steps",
         [](const char* value) {
           return fmt::format(
               "set profiling.enabled=true and profiling.steps={}: every rank records these "
               "steps into LOG_DIR/trace-rank-N.json",
               parse_step_range(value) ? value : "FIRST:END (END exclusive)");
         });
  refuse("NRL_NSYS_WORKER_PATTERNS", "the ranks of nrl-train have no worker names", [](const char*) {
    return "set profiling.enabled=true: every rank N records into a file of its own, "
           "LOG_DIR/trace-rank-N.json";
  });
}

void check_expert_keys(const ConfigResult& result, const model::ModelSpec& spec, Diagnostics& out) {
  const auto add = [&](const std::string& key, std::string message, const std::vector<std::string>& others,
                       std::string fix) {
    if (!result.origins.contains(key) || !result.sound(key)) return;
    if (!std::all_of(others.begin(), others.end(), [&](const auto& k) { return result.sound(k); })) return;
    out.push_back(without_effect(result, key, key + message, others, {"Fix: " + std::move(fix)}));
  };
  const DistributedConfig& d = result.config.distributed;
  if (spec.moe.experts > 0 && spec.moe.dispatcher == model::TokenDispatcher::allgather &&
      d.expert_parallel_size * d.expert_tensor_parallel_size == 1)
    add("policy.model.moe_token_dispatcher_type",
        ": allgather has no effect: no rank has experts that others lack",
        {"distributed.expert_parallel_size", "distributed.expert_tensor_parallel_size"},
        "remove it, or set distributed.expert_parallel_size above 1");
  if (spec.moe.experts > 0) {
    const bool whole = d.expert_parallel_size * d.expert_tensor_parallel_size == 1,
               gathers = spec.moe.dispatcher == model::TokenDispatcher::allgather;
    if (whole || gathers || spec.moe.pad_to_capacity)
      add("policy.model.moe_row_slack",
          fmt::format(" has no effect: {}", whole     ? "no rank has experts that others lack"
                                            : gathers ? "allgather brings all tokens to every rank"
                                                      : "padded experts get as many rows as their capacity"),
          {"distributed.expert_parallel_size", "distributed.expert_tensor_parallel_size",
           "policy.model.moe_token_dispatcher_type", "policy.model.moe_pad_expert_input_to_capacity"},
          "remove it");
  }
  if (spec.moe.experts > 0 && spec.moe.aux_loss == 0 && spec.moe.aux_tokens != model::AuxLoss::microbatch)
    add("policy.model.moe_router_load_balancing_type",
        fmt::format(": {} has no effect without policy.model.moe_aux_loss_coeff above 0",
                    spec.moe.aux_name()),
        {"policy.model.moe_aux_loss_coeff"}, "remove it, or set policy.model.moe_aux_loss_coeff");
}

void check_memory_limit(ConfigResult& result) {
  constexpr std::string_view key = "memory.max_memory";
  const Config& c = result.config;
  const double standard = MemoryConfig{}.max_memory, limit = c.memory.max_memory;
  // 1 is what such a run is held against.
  if (limit == standard || limit == 1 || !result.sound(key) || chooses_microbatch(c) ||
      plan::recompute_is_open(c.policy))
    return;
  const std::vector<std::string> others{"policy.train_micro_batch_size",
                                        "policy.gradient_accumulation_steps"};
  Diagnostic idle = without_effect(
      result, key,
      fmt::format("{}: {} has no effect: neither the microbatch nor what is recomputed is left to choose",
                  key, limit),
      others,
      {"Fix: remove it, or set policy.train_micro_batch_size or policy.recompute.granularity to auto"});
  const bool ignored = idle.severity == Severity::warning;
  result.add({std::move(idle)});
  if (!ignored) return;
  result.config.memory.max_memory = standard;
  result.origins.erase(std::string(key));
}

void check_offloaded_share(const ConfigResult& result, const model::ModelSpec& spec, int world,
                           Diagnostics& out) {
  constexpr std::string_view key = "policy.offload_optimizer";
  const Config& c = result.config;
  const double share = c.policy.offload_optimizer.value;
  if (share == 0) return;
  const DeviceType device = choose_device(c.device).type;
  const precision::Recipe recipe = plan::recipe_for(c, device, spec.layers);
  int64_t most = 0;
  for (const int rank : typical_ranks(c, world)) {
    const plan::GridPosition position = plan::grid_position(c, world, rank);
    model::ParameterList parameters =
        model::make_parameters(spec, plan::model_layout(c, spec, position, device));
    // Groups take long to make where there are many parameters, of which any share is enough.
    constexpr double most_groups = 16;
    double held = 0;
    for (const model::Parameter& p : parameters.all) held += static_cast<double>(p.numel());
    if (share * held / world / most_groups >= static_cast<double>(plan::offload_unit)) return;
    model::keep_in_fp8(recipe, parameters);
    memory::MemoryPlan memory;
    int64_t state = 0;
    for (const plan::ParamGroup& group : plan::make_param_groups(
             parameters,
             [&](const std::string& name) { return plan::group_options(c, position, recipe, name); },
             memory)) {
      if (group.offloaded_elements > 0) return;
      state += group.state_elements();
    }
    most = std::max(most, state);
  }
  out.push_back(diagnose(
      result, key,
      fmt::format("{}: {} moves nothing: that is {:.3g} of {} elements of a rank, and is rounded down to a "
                  "multiple of {}",
                  key, share, share * static_cast<double>(most), grouped(most), plan::offload_unit),
      "",
      {fmt::format(
          "Fix: {:.2g} or more, or false",
          std::min(1.0, 1.05 * static_cast<double>(plan::offload_unit) / static_cast<double>(most)))}));
}

}  // namespace nrl::train
