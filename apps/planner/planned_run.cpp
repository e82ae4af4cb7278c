#include "apps/planner/planned_run.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "apps/check/check.h"
#include "apps/machine/trainer_kernels.h"
#include "apps/plan/nodes.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/accelerator.h"
#include "apps/train/start/decide.h"
#include "apps/train/start/placement.h"
#include "apps/train/start/run_check.h"
#include "core/base/text.h"

namespace nrl::planner {
namespace {

// On another machine the run may well fit.
void warn_of_memory(PlannedRun& run) {
  for (Diagnostic& d : run.result.diagnostics)
    if (d.severity == Severity::error && d.exit == Exit::out_of_memory) {
      d.severity = Severity::warning;
      d.notes.push_back(fmt::format(
          "that is for all {} ranks on this machine, which would refuse the run. Fix: to plan for others, "
          "name a GPU (--device h100) or the ranks of a node (cluster.gpus_per_node); for this one, --device "
          "cpu",
          run.world));
    }
}

/// The rates of a CPU of this machine, the same for all estimates of the process.
const machine::DeviceModel& cpu_of_machine(int ranks, int threads) {
  static std::map<std::pair<int, int>, machine::DeviceModel> measured;
  const auto [at, added] = measured.try_emplace({ranks, threads});
  if (added) at->second = machine::measure_cpu_model(ranks, threads);
  return at->second;
}

std::vector<std::string> left_out(const Config& c) {
  std::vector<std::string> out;
  if (generates_rollouts(c)) out.emplace_back("generation of rollouts and their rewards");
  return out;
}

/// `layouts`: the configuration is one of many, some of which divide the experts.
machine::TrainedModel trained_model(const Config& c, const model::ModelSpec& spec, bool layouts) {
  const model::MoeSpec& moe = spec.moe;
  const bool experts = moe.experts > 0;
  const Fp8Config& fp8 = c.policy.fp8_cfg;
  return {.norm = spec.norm,
          .dropout = spec.attention_dropout > 0,
          .fp8 = fp8.enabled ? std::optional(fp8.fp8_recipe) : std::nullopt,
          .experts = experts,
          .exchanges = experts && !moe.pad_to_capacity &&
                       moe.dispatcher == model::TokenDispatcher::alltoall &&
                       (layouts || c.distributed.expert_parallel_size > 1),
          .graphs = c.policy.cuda_graph};
}

/// The GPU of the run with the kernels of another trainer, over which its profile counts.
machine::DeviceModel with_kernels(const PlannedRun& run, const std::string& trainer, bool layouts) {
  if (!run.gpu)
    fail(Exit::usage, "--trainer estimates with kernels of a GPU. Fix: --device with one of {}",
         machine::device_model_names());
  if (run.profile && !run.profile->calls.empty())
    fail(Exit::usage,
         "--trainer: the profile has times of our own calls. Fix: leave out --profile, or its calls");
  const machine::Trainer found =
      machine::find_trainer(trainer, trained_model(run.result.config, *run.spec, layouts));
  const machine::DeviceModel model = found.on(machine::find_device_model("--device", run.gpu->name));
  return run.profile ? run.profile->device(model) : model;
}

}  // namespace

PlannedRun prepare(const PlanRequest& request, bool layouts) {
  PlannedRun run{.overrides = request.overrides, .result = {}, .world = request.world};
  std::string device = request.device;
  if (!request.profile.empty()) {
    run.profile = std::make_shared<machine::Profile>(machine::read_profile(request.profile));
    if (device == "auto") device = run.profile->base;
    if (device != run.profile->base)
      fail(Exit::usage,
           "--profile: {} is of {}, but the plan is for {}. Fix: leave out --device, or the profile",
           request.profile, run.profile->base, device);
  }
  const bool named = device != "auto" && device != "cpu" && device != "cuda";
  if (named) run.gpu = &machine::find_device_model("--device", device);
  if (named && run.profile) {
    run.described = std::make_shared<machine::DeviceModel>(run.profile->device(*run.gpu));
    run.gpu = run.described.get();
  }
  if (device != "auto") run.overrides.push_back("device=" + (named ? "cuda" : device));
  run.result = load_config(request.config, run.overrides);
  ConfigResult& result = run.result;
  run.spec = train::check_but_memory(
      result, {.world = layouts ? 0 : run.world, .count = RankCount::planned, .files = false});
  if (run.gpu && result.ok()) result.add(check::check_fp8_on_gpu(result, *run.spec, *run.gpu));
  if (!request.trainer.empty() && result.ok()) {
    run.trainer = request.trainer;
    run.described = std::make_shared<machine::DeviceModel>(
        with_kernels(run, request.trainer, layouts || request.of_search));
    run.gpu = run.described.get();
  }
  if (layouts || !result.ok()) return run;
  run.device = train::choose_device(result.config.device);
  if (run.gpu) run.device.memory = run.gpu->for_plan(train::communicators_of_run(result, run.world));
  result.add(plan::check_nodes(result, plan::configured_nodes(result.config, run.world), run.device.type));
  if (!result.ok()) return run;
  run.complete = true;
  run.batch = resolve_batch(result.config, run.world);
  const bool known = knows_memory(result.config, run.world, run.device);
  if (known) train::check_memory_limit(result);
  if (known && result.ok()) {
    const std::vector<int> local = plan::local_sizes(result.config, run.world);
    const int most = *std::max_element(local.begin(), local.end());
    const train::DecisionFacts facts =
        train::planned_facts(result, *run.spec, run.world, most, run.device.memory);
    const train::Decision decision = train::decide_alone(facts, &run.plans);
    if (decision.fits) run.batch = decision.batch;
    auto& plans = run.plans.plans;
    if (!plans.empty() && (plans.front()->batch.micro != run.batch.micro || local.front() != most))
      plans.clear();
    result.add(explain(facts, decision));
  }
  if (assumes_this_machine(result.config, run.world, run.device)) warn_of_memory(run);
  return run;
}

std::optional<machine::DeviceModel> model_of(const PlannedRun& run, int threads, std::string& unknown) {
  if (run.gpu) return *run.gpu;
  if (run.device.type == DeviceType::cpu) {
    const machine::DeviceModel& here =
        cpu_of_machine(plan::local_sizes(run.result.config, run.world).front(), threads);
    return run.profile ? run.profile->device(here) : here;
  }
  std::string why_not;
  const train::AcceleratorBackend& backend = train::accelerator_backend();
  if (backend.devices(why_not).empty()) {
    unknown =
        fmt::format("the GPU is not known. Fix: --device with one of {}", machine::device_model_names());
    return std::nullopt;
  }
  const device::Properties found = backend.open(0)->properties();
  if (const machine::DeviceModel* model = machine::model_of_device(found)) return *model;
  unknown = fmt::format("the rates of {} are not known. Fix: --device with one of {}", found.name,
                        machine::device_model_names());
  return std::nullopt;
}

RunEstimate estimate_run(PlannedRun& run, EstimatedStages* kept) {
  const Config& c = run.result.config;
  RunEstimate out{.gpu = run.device.type == DeviceType::cuda,
                  .fp8 = c.policy.fp8_cfg.enabled,
                  .world = run.world,
                  .without = left_out(c)};
  const std::vector<int> local = plan::local_sizes(c, run.world);
  const int threads = train::threads_for(c.kernels, local.front());
  const std::optional<machine::DeviceModel> model = model_of(run, threads, out.unknown);
  if (!model) return out;
  EstimatedStages own;
  EstimatedStages& of = kept ? *kept : own;
  of.device = std::make_unique<predict::ModeledDevice>(
      *model, c.kernels.tf32, threads, run.profile ? std::optional(*run.profile) : std::nullopt);
  const predict::ModeledDevice& device = *of.device;
  const std::vector<ClusterNode> nodes = plan::configured_nodes(c, run.world);
  const size_t memory = train::memory_for_rank(c.kernels, run.device.type, run.device.memory,
                                               *std::max_element(local.begin(), local.end()));
  plan::StagePlans plans = std::move(run.plans);
  if (plans.plans.empty())
    plans = plan::plan_stages(c, *run.spec, run.batch, run.world, device.type(), threads, memory);
  of.stages = std::make_unique<predict::DryStages>(c, std::move(plans), device, nodes);
  const predict::DryStages& stages = *of.stages;
  out.likely = stages.estimate();
  out.good = stages.estimate(machine::good).step;
  out.poor = stages.estimate(machine::poor).step;
  out.run = predict::forecast_run(
      c, predict::run_facts(c, stages, device, static_cast<int>(nodes.size()), out.likely), *model);
  if (model->kernels) out.trainer = run.trainer;
  out.tokens = static_cast<double>(run.batch.tokens_per_step);
  out.flops = model::training_flops_per_token(*run.spec, c.policy.max_total_sequence_length);
  out.peak = model->bf16_flops() * run.world;
  return out;
}

std::string text_of(const RunEstimate& e) {
  if (!e.unknown.empty()) return fmt::format("estimate none: {}", e.unknown);
  const predict::StepEstimate& s = e.likely;
  // Three digits or more of a time in milliseconds.
  const auto ms = [](double seconds) {
    const double x = seconds * 1e3;
    return x >= 1000  ? grouped(std::llround(x))
           : x >= 100 ? fmt::format("{:.0f}", x)
                      : fmt::format("{:.3g}", x);
  };
  const auto share = [&](double seconds) { return fmt::format("{:.1f} %", 100 * seconds / s.step); };
  std::string text =
      fmt::format("estimate {} ms per step: {} tokens/s, mfu {:.1f} %{}  ({}; good rates {}, poor {})\n",
                  ms(s.step), grouped(std::llround(e.tokens_per_second())), 100 * e.mfu(),
                  e.fp8 ? " of bf16" : "", s.sources(), ms(e.good), ms(e.poor));
  std::string parts;
  for (const auto& [name, seconds] :
       {std::pair("computation", s.compute), std::pair("layers", s.layers), std::pair("bubble", s.pipeline),
        std::pair("data", s.data), std::pair("offload", s.offload), std::pair("update", s.update),
        std::pair("host", s.host), std::pair("spread", s.spread)})
    if (seconds > 0) parts += fmt::format("{}{} {}", parts.empty() ? "" : "   ", name, share(seconds));
  text += "  " + parts;
  text += fmt::format("\n  busy  {} {}", e.gpu ? "multiprocessors" : "processors", share(s.busy.processors));
  for (const machine::Link link : machine::all_links)
    if (s.busy.of(link) > 0)
      text += fmt::format("   {} {}", machine::name_of(link, e.gpu), share(s.busy.of(link)));
  if (!e.trainer.empty()) text += fmt::format("\n  with the kernels of {}; all else is ours", e.trainer);
  for (const std::string& part : e.without) text += fmt::format("\n  without {}", part);
  text += "\nrun      " + e.run.text();
  return text;
}

JsonValue json_of(const predict::StepEstimate& s) {
  return JsonValue::object({{"step_s", s.step},
                            {"parts_s", JsonValue::object({{"compute", s.compute},
                                                           {"layers", s.layers},
                                                           {"pipeline", s.pipeline},
                                                           {"data", s.data},
                                                           {"offload", s.offload},
                                                           {"update", s.update},
                                                           {"host", s.host},
                                                           {"spread", s.spread}})},
                            {"busy_s", JsonValue::object({{"processors", s.busy.processors},
                                                          {"node", s.busy.node()},
                                                          {"adapter", s.busy.adapter()},
                                                          {"to_host", s.busy.of(machine::Link::to_host)},
                                                          {"from_host", s.busy.of(machine::Link::from_host)},
                                                          {"host", s.busy.of(machine::Link::host)}})},
                            {"sources", JsonValue::object({{"kernels", std::string(name_of(s.kernels))},
                                                           {"links", std::string(name_of(s.links))}})}});
}

JsonValue json_of(const RunEstimate& e) {
  if (!e.unknown.empty()) return {};
  JsonValue out = json_of(e.likely);
  JsonObject& members = out.members();
  members.set("good_s", e.good);
  members.set("poor_s", e.poor);
  members.set("tokens_per_s", e.tokens_per_second());
  members.set("mfu", e.mfu());
  members.set("without", JsonValue(e.without));
  members.set("trainer", e.trainer.empty() ? JsonValue() : JsonValue(e.trainer));
  members.set("run", e.run.json());
  return out;
}

JsonValue json_of(const PlannedRun& run, const RankPlans& plans, const RunEstimate& estimate) {
  const Config& c = run.result.config;
  const plan::RunPlan& plan = plans.largest();
  const parallel::ProcessGrid& grid = plan.position.grid;
  const parallel::GridPoint &dense = grid.dense().sizes(), &expert = grid.expert().sizes();
  JsonValue memory = JsonValue::object();
  for (int i = 0; i < memory::category_count; ++i) {
    const auto category = static_cast<memory::Category>(i);
    memory.members().set(std::string(memory::name_of(category)), plan.memory.bytes(category));
  }
  memory.members().set("total", plan.memory.total_bytes());
  memory.members().set("pinned_host", plan.memory.bytes(memory::Tier::pinned));
  memory.members().set("offloaded", plan.memory.bytes(memory::Tier::host));
  memory.members().set(
      "of_device", run.device.memory > 0 ? JsonValue(static_cast<int64_t>(run.device.memory)) : JsonValue());
  std::vector<JsonValue> traffic;
  for (const plan::Traffic& t : plans.traffic)
    traffic.push_back(JsonValue::object({{"group", name_of(t.group)},
                                         {"ranks", t.ranks},
                                         {"operation", std::string(name_of(t.op))},
                                         {"purpose", std::string(name_of(t.purpose))},
                                         {"calls", t.count},
                                         {"bytes", t.bytes},
                                         {"sent_bytes", t.wire()},
                                         {"assumes_balanced_experts", t.balanced()}}));
  return JsonValue::object(
      {{"schema", 1},
       {"world", run.world},
       {"device", run.gpu                               ? std::string(run.gpu->name)
                  : run.device.type == DeviceType::cuda ? std::string("cuda")
                                                        : std::string("cpu")},
       {"model", JsonValue::object({{"parameters", plan.whole().total()},
                                    {"layers", plan.spec.layers},
                                    {"sequence_length", plan.sequence_length},
                                    {"training_flops_per_token",
                                     training_flops_per_token(plan.spec, plan.sequence_length)}})},
       {"grid", JsonValue::object({{"tp", dense.tp},
                                   {"cp", dense.cp},
                                   {"dp", dense.dp},
                                   {"pp", dense.pp},
                                   {"ep", expert.ep},
                                   {"etp", expert.tp},
                                   {"chunks", plan.layout.chunks},
                                   {"shard_strategy", std::string(name_of(c.distributed.shard_strategy))}})},
       {"batch", JsonValue::object({{"global", run.batch.global},
                                    {"micro", run.batch.micro},
                                    {"accumulation", run.batch.accumulation},
                                    {"data_parallel", run.batch.data_parallel},
                                    {"tokens_per_step", run.batch.tokens_per_step}})},
       {"memory_bytes", std::move(memory)},
       {"traffic", JsonValue(std::move(traffic))},
       {"estimate", json_of(estimate)},
       {"no_estimate", estimate.unknown.empty() ? JsonValue() : JsonValue(estimate.unknown)}});
}

}  // namespace nrl::planner
