#include "apps/train/start/decide.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "apps/check/check.h"
#include "apps/plan/recompute.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/launch/launch.h"
#include "apps/train/start/memory_fit.h"
#include "core/base/text.h"
#include "core/device/cpu/memory.h"

namespace nrl::train {
namespace {

std::string memory_owner(bool gpu, int local) {
  if (gpu) return "the GPU";
  return local == 1 ? "this machine" : fmt::format("this machine (shared by {} ranks)", local);
}

bool may_shrink(const DecisionFacts& facts) {
  const Config& c = facts.result.config;
  return chooses_microbatch(c) || c.memory.on_oom == OnOom::reduce_batch;
}

std::optional<BatchPlan> smaller(const DecisionFacts& facts, const BatchPlan& batch) {
  return may_shrink(facts) ? smaller_microbatch(batch) : std::nullopt;
}

/// The bytes of `capacity` that a plan may have.
double limit(const DecisionFacts& facts, double capacity) {
  const Config& c = facts.result.config;
  return chooses_microbatch(c) ? c.memory.max_memory * capacity : capacity;
}

bool fits(const DecisionFacts& facts, const Need& need) {
  return plan::total(need.bytes) <= limit(facts, need.capacity);
}

/// `last`: there is no other microbatch to try.
Need need_of(const DecisionFacts& facts, const Planned& planned, const BatchPlan& batch, bool last) {
  const Need least{plan::minimum_memory(facts.result.config, facts.spec, batch, facts.device),
                   facts.capacity};
  // A run that is a little too large is planned too, to show what it needs exactly.
  const bool little = batch.accumulation <= 1024 && plan::total(least.bytes) < 16 * facts.capacity;
  return fits(facts, least) || (last && little) ? planned(batch) : least;
}

Decision decide_from(const DecisionFacts& facts, const Planned& planned, Decision d) {
  for (;;) {
    const std::optional<BatchPlan> next = smaller(facts, d.batch);
    d.need = need_of(facts, planned, d.batch, !next);
    if (!d.reduced()) d.before = d.need;
    d.fits = fits(facts, d.need);
    if (d.fits || !next) return d;
    d.batch = *next;
  }
}

/// Why there is no other microbatch to take; empty if there may be none.
std::string no_less_than(const DecisionFacts& facts, const BatchPlan& batch) {
  if (!may_shrink(facts)) return "";
  return fmt::format("A microbatch of {} cannot be made smaller",
                     batch.micro == 1 ? "one sequence" : fmt::format("{} sequences", batch.micro));
}

std::string bytes_text(double bytes) {
  return human_bytes(static_cast<uint64_t>(bytes));
}

Diagnostic reduction_warning(const DecisionFacts& facts, const Decision& d) {
  const bool chosen = chooses_microbatch(facts.result.config);
  const std::string key = chosen ? "policy.train_micro_batch_size" : "memory.on_oom";
  const std::string message =
      chosen ? fmt::format(
                   "{}: auto takes {} sequences and accumulates {} microbatches, because {} "
                   "sequences do not fit",
                   key, d.batch.micro, d.batch.accumulation, d.configured.micro)
             : fmt::format(
                   "{}: a microbatch of {} does not fit; the run takes {} sequences and accumulates "
                   "{} microbatches instead of {}: steps have the same samples and tokens",
                   key, d.configured.micro, d.batch.micro, d.batch.accumulation, d.configured.accumulation);
  std::vector<std::string> notes;
  notes.push_back(
      !d.why.empty()
          ? d.why
          : fmt::format("a rank needs {} instead of {} or more; the limit is {}{}",
                        bytes_text(plan::total(d.need.bytes)), bytes_text(plan::total(d.before.bytes)),
                        bytes_text(limit(facts, d.need.capacity)), chosen ? " (memory.max_memory)" : ""));
  if (const std::string why = check::microbatch_dependence(facts.spec); !why.empty())
    notes.push_back(fmt::format("this changes the training, because {}: give a number to fix it", why));
  return diagnose(facts.result, key, message, "", std::move(notes), Severity::warning);
}

Diagnostic shortage_problem(const DecisionFacts& facts, const Decision& d) {
  const bool chosen = chooses_microbatch(facts.result.config);
  auto shortage = (chosen ? plan::share_shortage : plan::memory_shortage)(
      facts.result, facts.spec, d.batch, d.need.bytes, d.need.capacity, facts.owner);
  NRL_CHECK(shortage, "a decision that fits is no problem");
  const ConfigResult least = d.reduced() ? with_microbatch(facts.result, d.batch) : facts.result;
  plan::add_changes(*shortage, fitting_notes(changes_that_fit(least, facts.world, facts.device, facts.threads,
                                                              limit(facts, d.need.capacity), facts.memory)));
  if (!chosen && may_shrink(facts)) shortage->notes.push_back(no_less_than(facts, d.batch));
  return *shortage;
}

}  // namespace

DecisionFacts planned_facts(const ConfigResult& result, const model::ModelSpec& spec, int world, int local,
                            size_t gpu_memory) {
  const Config& c = result.config;
  const DeviceType device = choose_device(c.device).type;
  const bool gpu = device == DeviceType::cuda;
  return {.result = result,
          .spec = spec,
          .world = world,
          .device = device,
          .threads = threads_for(c.kernels, local),
          .memory = memory_for_rank(c.kernels, device, gpu_memory, local),
          .capacity = static_cast<double>(gpu ? gpu_memory : cpu::machine_memory()) / (gpu ? 1 : local),
          .owner = memory_owner(gpu, local)};
}

Decision decide(const DecisionFacts& facts, const Planned& planned) {
  const BatchPlan batch = resolve_batch(facts.result.config, facts.world);
  return decide_from(facts, planned, {.configured = batch, .batch = batch});
}

std::optional<Decision> decide_below(const DecisionFacts& facts, const Planned& planned, Decision failed,
                                     std::string why) {
  const std::optional<BatchPlan> next = smaller(facts, failed.batch);
  if (!next) return std::nullopt;
  failed.batch = *next;
  if (failed.why.empty()) failed.why = std::move(why);
  return decide_from(facts, planned, std::move(failed));
}

Decision decide_alone(const DecisionFacts& facts, plan::StagePlans* last) {
  return decide(facts, [&](const BatchPlan& batch) {
    const Config& c = facts.result.config;
    plan::StagePlans plans =
        plan::plan_stages(c, facts.spec, batch, facts.world, facts.device, facts.threads, facts.memory);
    const Need need{largest_need(c, plans), facts.capacity};
    if (last) *last = std::move(plans);
    return need;
  });
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

Diagnostics explain(const DecisionFacts& facts, const Decision& d) {
  if (!d.fits) return {shortage_problem(facts, d)};
  if (d.reduced()) return {reduction_warning(facts, d)};
  return {};
}

ConfigResult with_microbatch(ConfigResult result, const BatchPlan& batch) {
  PolicyConfig& policy = result.config.policy;
  policy.train_micro_batch_size = batch.micro;
  if (policy.gradient_accumulation_steps) policy.gradient_accumulation_steps = batch.accumulation;
  return result;
}

std::unique_ptr<plan::RunPlan> plan_rank(const ConfigResult& result, const model::ModelSpec& spec,
                                         const BatchPlan& batch, const Placement& placement) {
  return plan::make_run_plan(result.config, spec, batch, placement.grid_position(), placement.device(),
                             placement.host_threads(), {}, placement.memory());
}

namespace {

DecisionFacts facts_of(comm::World& world, const ConfigResult& result, const model::ModelSpec& spec,
                       const Placement& placement) {
  auto capacity = static_cast<double>(placement.capacity());
  world.comm().all_reduce(std::span(&capacity, 1), comm::Reduce::max);
  const bool gpu = placement.device() == DeviceType::cuda;
  return {.result = result,
          .spec = spec,
          .world = world.size(),
          .device = placement.device(),
          .threads = placement.host_threads(),
          .memory = placement.memory(),
          .capacity = capacity,
          .owner = memory_owner(gpu, world.local_size())};
}

/// Collective: the need of the rank with the least room.
Need least_room(comm::Communicator& all, const Need& own) {
  const double used = plan::total(own.bytes) / own.capacity;
  double most = used;
  all.all_reduce(std::span(&most, 1), comm::Reduce::max);
  double first = used == most ? all.rank() : all.size();
  all.all_reduce(std::span(&first, 1), comm::Reduce::min);
  // The numbers of one rank, and zeros of the others.
  std::array<double, memory::category_count + 1> numbers = {};
  if (static_cast<int>(first) == all.rank()) {
    std::copy(own.bytes.begin(), own.bytes.end(), numbers.begin());
    numbers.back() = own.capacity;
  }
  all.all_reduce(std::span(numbers), comm::Reduce::sum);
  Need out{.capacity = numbers.back(), .rank = static_cast<int>(first)};
  std::copy_n(numbers.begin(), out.bytes.size(), out.bytes.begin());
  return out;
}

model::ModelSpec spec_of(comm::World& world, const ConfigResult& result) {
  model::ModelSpec spec;
  run_collectively(world, [&] { spec = load_model_spec(result); });
  return spec;
}

}  // namespace

RankDecision::RankDecision(comm::World& world, const ConfigResult& result, const Placement& placement)
    : world_(world),
      placement_(placement),
      spec_(spec_of(world, result)),
      facts_(facts_of(world, result, spec_, placement)),
      decision_(decide(facts_, [this](const BatchPlan& batch) { return try_plan(batch); })) {
  require();
}

std::unique_ptr<plan::RunPlan> RankDecision::take() {
  return plan_ ? std::move(plan_) : plan_rank(facts_.result, spec_, decision_.batch, placement_);
}

Need RankDecision::try_plan(const BatchPlan& batch) {
  Need own{.capacity = static_cast<double>(placement_.capacity())};
  run_collectively(world_, [&] {
    plan_ = plan_rank(facts_.result, spec_, batch, placement_);
    own.bytes = needed_memory(facts_.result.config, *plan_);
  });
  return least_room(world_.comm(), own);
}

void RankDecision::require() {
  run_collectively(world_, [&] {
    if (!decision_.fits && world_.rank() == decision_.need.rank) raise(explain(facts_, decision_));
  });
}

bool RankDecision::take_less(std::string why) {
  plan_ = nullptr;
  auto less = decide_below(
      facts_, [this](const BatchPlan& batch) { return try_plan(batch); }, decision_, std::move(why));
  if (!less) return false;
  decision_ = std::move(*less);
  require();
  return true;
}

std::string RankDecision::no_less() const {
  return no_less_than(facts_, decision_.batch);
}

std::vector<std::string> RankDecision::changes(double capacity) const {
  return fitting_notes(
      changes_that_fit(facts_.result, facts_.world, facts_.device, facts_.threads, capacity, facts_.memory));
}

}  // namespace nrl::train
