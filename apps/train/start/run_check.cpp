#include "apps/train/start/run_check.h"

#include <optional>

#include "apps/check/check.h"
#include "apps/plan/memory_check.h"
#include "apps/plan/recompute.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/start/document_rules.h"
#include "apps/train/start/memory_fit.h"
#include "apps/train/state/model_source.h"
#include "core/base/text.h"
#include "core/device/cpu/memory.h"

namespace nrl::train {
namespace {

// Refuses a memory.max_memory that limits no choice of a run. Where that is a warning, it gets its default.
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

/// Why document_rules() fails; unset where it does not.
std::optional<Error> document_problem(const ConfigResult& result) {
  for (const char* key : {"data.train.data_path", "data.validation.data_path", "policy.tokenizer.name"})
    if (!result.sound(key)) return std::nullopt;
  try {
    document_rules(result.config);
  } catch (const Error& e) {
    return e;
  }
  return std::nullopt;
}

// Takes smaller microbatches until the run needs at most `limit`. False if none does. `chosen`: by auto.
bool reduce_batch(ConfigResult& result, const model::ModelSpec& spec, const RunSetting& setting,
                  DeviceType device, int threads, double limit, bool chosen) {
  const BatchPlan before = resolve_batch(result.config, setting.world);
  const auto need_of = [&](const Config& config, const BatchPlan& batch) {
    return needed_memory(config, spec, batch, setting.world, device, threads, limit,
                         memory_for_rank(config.kernels, device, setting.gpu_memory, setting.local));
  };
  for (auto batch = smaller_microbatch(before); batch; batch = smaller_microbatch(*batch)) {
    Config smaller = result.config;
    set_microbatch(smaller, *batch);
    const double need = need_of(smaller, *batch);
    if (need > limit) continue;
    std::vector<std::string> notes{fmt::format(
        "a rank needs {} instead of {} or more; the limit is {}{}", human_bytes(static_cast<uint64_t>(need)),
        human_bytes(static_cast<uint64_t>(need_of(result.config, before))),
        human_bytes(static_cast<uint64_t>(limit)), chosen ? " (memory.max_memory)" : "")};
    if (const std::string why = check::microbatch_dependence(spec); !why.empty())
      notes.push_back(fmt::format("this changes the training, because {}: give a number to fix it", why));
    result.add(
        {diagnose(result, chosen ? "policy.train_micro_batch_size" : "memory.on_oom",
                  microbatch_change(before, *batch, chosen), "", std::move(notes), Severity::warning)});
    result.config = std::move(smaller);
    return true;
  }
  return false;
}

}  // namespace

void fit_memory(ConfigResult& result, const model::ModelSpec& spec, const RunSetting& setting) {
  if (setting.memory) check_memory_limit(result);
  if (!result.ok()) return;
  const Config& c = result.config;
  const BatchPlan batch = resolve_batch(c, setting.world);
  const DeviceType device = choose_device(c.device).type;
  const int threads = threads_for(c.kernels, setting.local);
  const bool on_cpu = device == DeviceType::cpu, known = setting.memory && (on_cpu || setting.gpu_memory > 0);
  // 1 PiB is more than any machine has.
  const double capacity = !known   ? static_cast<double>(int64_t{1} << 50)
                          : on_cpu ? static_cast<double>(cpu::machine_memory()) / setting.local
                                   : static_cast<double>(setting.gpu_memory);
  const std::string owner = !known    ? "any machine"
                            : !on_cpu ? "the GPU"
                            : setting.local == 1
                                ? "this machine"
                                : fmt::format("this machine (shared by {} ranks)", setting.local);
  const size_t memory = memory_for_rank(c.kernels, device, setting.gpu_memory, setting.local);
  const double budget = c.memory.max_memory * capacity;
  const auto valid = [&](ConfigResult& changed) {
    RunSetting other = setting;
    other.files = other.memory = false;
    check_run(changed, other);
    return changed.ok();
  };
  if (known && chooses_microbatch(c) &&
      needed_memory(c, spec, batch, setting.world, device, threads, budget, memory) > budget) {
    if (reduce_batch(result, spec, setting, device, threads, budget, true)) return;
    ConfigResult least = result;
    const BatchPlan smallest = least_microbatch(batch);
    set_microbatch(least.config, smallest);
    plan::CategoryBytes need = plan::minimum_memory(c, spec, smallest, device);
    if (plan::total(need) <= budget)
      need = largest_need(least.config, spec, smallest, setting.world, device, threads, memory);
    if (auto shortage = plan::share_shortage(result, spec, smallest, need, capacity, owner)) {
      plan::add_changes(*shortage, fitting_notes(changes_that_fit(least, setting.world, valid, device,
                                                                  threads, budget, memory)));
      result.add({std::move(*shortage)});
    }
    return;
  }
  const plan::CategoryBytes least = plan::minimum_memory(c, spec, batch, device);
  auto shortage = plan::memory_shortage(result, spec, batch, least, capacity, owner);
  // A run that is a little too large is planned too, to show what it needs exactly.
  constexpr double least_share = 1.0 / 16;
  const bool little = shortage && batch.accumulation <= 1024 && plan::total(least) < capacity / least_share;
  if (known && (!shortage || little)) {
    const plan::CategoryBytes need = largest_need(c, spec, batch, setting.world, device, threads, memory);
    shortage = plan::memory_shortage(result, spec, batch, need, capacity, owner);
  }
  if (!shortage) return;
  if (known && c.memory.on_oom == OnOom::reduce_batch &&
      reduce_batch(result, spec, setting, device, threads, capacity, false))
    return;
  if (known)
    plan::add_changes(*shortage, fitting_notes(changes_that_fit(result, setting.world, valid, device, threads,
                                                                capacity, memory)));
  result.add({std::move(*shortage)});
}

void check_run(ConfigResult& result, const RunSetting& setting) {
  if (setting.grid && setting.world > 0)
    result.add(validate_for_world(result, setting.world, setting.nodes, setting.count));
  const ModelCheck model = check_model(result);
  result.add(model.problems);
  const DeviceChoice device = choose_device(result.config.device);
  check::Facts facts{.result = result,
                     .model = model.spec ? &*model.spec : nullptr,
                     .gpu = device.type == DeviceType::cuda,
                     .why_no_gpu = device.why_no_gpu,
                     .world = setting.world,
                     .documents = document_problem(result)};
  result.add(check::check_inputs(facts, setting.files, setting.training));
  if (!facts.model) return;
  if (!setting.grid) facts.world = 0;
  result.add(check::check_model(facts));
  if (!result.ok() || facts.world == 0) return;
  result.add(check::check_ranks(facts));
  if (result.ok()) fit_memory(result, *model.spec, setting);
}

void check_tried_run(ConfigResult& result, const RunSetting& setting) {
  try {
    check_run(result, setting);
  } catch (const Error& e) {
    if (e.code() == Exit::internal) throw;
    Diagnostic problem;
    problem.exit = e.code();
    problem.message = e.what();
    result.add({problem});
  }
}

}  // namespace nrl::train
