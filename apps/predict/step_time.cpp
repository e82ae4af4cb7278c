#include "apps/predict/step_time.h"

#include <algorithm>

#include "apps/machine/trainer_kernels.h"
#include "apps/plan/nodes.h"
#include "apps/plan/pipeline.h"
#include "apps/predict/spread.h"
#include "core/base/error.h"
#include "core/device/cpu/parallel.h"
#include "core/device/dry_run.h"
#include "core/ops/libraries.h"

namespace nrl::predict {
namespace {

/// NCCL's channels: multiprocessors that an operation in flight takes from the kernels beside it. Assumed.
constexpr double nccl_channels = 16;
/// Hopper's GEMMs of cuBLAS divide their tiles among as many blocks as there are multiprocessors. Those that
/// an operation keeps waiting begin when the others have ended: twice the time (pytorch issue 143988, FSDP on
/// H100; cutlass issue 2471: a Blackwell GPU divides tiles while kernels run).
constexpr double hopper_gemm_beside_operation = 2;

/// Repetitions of the period of a step's program that are dry-run: the others are alike.
constexpr int repetitions = 2;

double expert_bytes(const engine::DryStep& step) {
  double sum = 0;
  for (const plan::TrafficEvent& e : step.events)
    if (!e.what.wait && e.what.purpose == comm::Purpose::experts) sum += static_cast<double>(e.what.bytes);
  return sum;
}

/// Seconds in which no resource is occupied longer than it exists.
double at_least(double step, const Busy& busy) {
  return std::max(step, busy.most());
}

}  // namespace

machine::Overlap overlap_of(const ModeledDevice& device, int local_ranks) {
  const machine::DeviceModel& model = device.model();
  if (device.profile() && !device.profile()->overlap.empty())
    return machine::Overlap(device.profile()->overlap);
  if (model.gpu()) {
    const double share = 1 + nccl_channels / model.multiprocessors;
    return machine::Overlap({.call = model.major == 9 ? hopper_gemm_beside_operation : share},
                            {.call = share}, model.kernels && model.kernels->streams);
  }
  // The thread that moves the bytes has a core of its own, or all threads get equal parts of the cores, so
  // that the bytes take longer as well.
  const int threads = device.threads();
  if (local_ranks * threads < cpu::available_cores()) return machine::Overlap();
  const double factor = 1 + 1.0 / threads;
  return machine::Overlap({.call = factor, .operation = factor});
}

ModeledDevice::ModeledDevice(const machine::DeviceModel& model, bool tf32, int threads,
                             std::optional<machine::Profile> profile)
    : ops::DryDevice(model.gpu() ? ops::DryDevice(model.properties(), {.tf32 = tf32}, threads)
                                 : ops::DryDevice(threads)),
      model_(model),
      tf32_(tf32),
      profile_(std::move(profile)) {}

std::string StepEstimate::sources() const {
  const bool linked = std::any_of(busy.links.begin(), busy.links.end(), [](double s) { return s > 0; });
  return fmt::format("kernels {}{}", name_of(kernels),
                     linked ? fmt::format(", links {}", name_of(links)) : "");
}

plan::StagePlans plan_stages(const Config& c, const model::ModelSpec& spec, int world,
                             const ModeledDevice& device, double capacity, bool only_fitting) {
  return plan::plan_stages(c, spec, resolve_batch(c, world), world, device.type(), device.threads(),
                           static_cast<size_t>(capacity / c.memory.max_memory),
                           only_fitting ? std::optional(capacity) : std::nullopt);
}

DryStages::DryStages(const Config& c, plan::StagePlans plans, const ModeledDevice& device,
                     std::span<const ClusterNode> nodes, double expert_load)
    : device_(device),
      fabric_(c.cluster, device.model(), nodes, plans.plans.front()->position.ranks()),
      layout_(plans.plans.front()->layout),
      microbatches_(plans.plans.front()->batch.accumulation),
      overlap_(overlap_of(device, fabric_.domain_ranks())),
      expert_load_(expert_load),
      spread_(device.profile() ? device.profile()->spread.value_or(assumed_spread) : assumed_spread) {
  if (device.profile()) fabric_.set_measured(device.profile()->links);
  schedule_ = plan::schedule_options(c, layout_, microbatches_);
  for (std::unique_ptr<plan::RunPlan>& plan : plans.plans) {
    model::Decoder& decoder = *plan->decoder;
    Stage stage{.stage = plan->position.at.pp, .engine = {}, .step = {}};
    stage.engine =
        std::make_unique<engine::Engine>(std::move(plan), engine::training_options(c), device.exec());
    engine::Engine& engine = *stage.engine;
    stage.step = engine.dry_step(engine.objective(), true, repetitions);
    if (expert_load != 1) {
      // The dry run knows the rounds of the rows, but not their bytes: all of them are the load times the
      // bytes of an even router.
      decoder.set_expert_load(expert_load);
      const double even = expert_bytes(stage.step);
      stage.step = engine.dry_step(engine.objective(), true, repetitions);
      if (even > 0) expert_load_ = expert_load * even / expert_bytes(stage.step);
    }
    stages_.push_back(std::move(stage));
  }
}

DryStages::~DryStages() = default;
DryStages::DryStages(DryStages&&) noexcept = default;

Rates DryStages::rates(const machine::CallTimes& calls) const {
  return {.calls = calls,
          .fabric = fabric_,
          .expert_load = expert_load_,
          .router = stages_.front().engine->plan().spec.moe.rule,
          .overlap = overlap_};
}

StepEstimate DryStages::estimate(const machine::Scenario& scenario, StepDerivation* derivation) const {
  const machine::CallTimes calls = call_times(scenario);
  pipeline::MicrobatchCosts costs;
  for (pipeline::Costs* c : {&costs.first, &costs.middle, &costs.last})
    c->resize(static_cast<size_t>(layout_.model_chunks()));
  StepEstimate out{.kernels = machine::Source::measured, .links = machine::Source::measured};
  double longest = 0, afterwards = 0;
  for (size_t i = 0; i < stages_.size(); ++i) {
    const engine::Engine& engine = *stages_[i].engine;
    StageItems items =
        stage_items(stages_[i].step, *engine.plan().decoder, engine.plan().position.grid, rates(calls));
    const StageTime time = stage_time(items, layout_.chunks, microbatches_, overlap_);
    out.kernels = weakest(out.kernels, items.kernels);
    out.links = weakest(out.links, items.links);
    out.busy.raise(time.busy);
    afterwards = std::max(afterwards, time.end.total() + time.outside);
    if (time.total() > longest) {
      longest = time.total();
      out.compute = time.passes.compute;
      out.update = time.end.compute;
      out.host = time.passes.host + time.end.host;
      out.layers = time.passes.layers() + time.end.layers();
      out.data = time.passes.data() + time.end.data();
      out.offload = time.passes.offload() + time.end.offload();
    }
    const int until = i + 1 < stages_.size() ? stages_[i + 1].stage : layout_.stages;
    set_costs(time, stages_[i].stage, until, layout_.stages, costs);
    if (derivation) derivation->items.push_back(std::move(items));
  }
  const double alone = at_least(longest, out.busy);
  out.step = alone;
  out.data += alone - longest;
  if (layout_.stages > 1 || derivation) {
    std::vector<pipeline::Schedule> schedules;
    for (int stage = 0; stage < layout_.stages; ++stage) schedules.push_back(make_schedule(schedule_, stage));
    if (layout_.stages > 1) {
      out.step = at_least(makespan(schedules, costs) + afterwards, out.busy);
      out.pipeline = std::max(0.0, out.step - alone);
    }
    if (derivation) {
      derivation->simulation = simulate(schedules, costs);
      NRL_CHECK(derivation->simulation.deadlock.empty(), "{}", derivation->simulation.deadlock);
      derivation->schedules = std::move(schedules);
    }
  }
  out.spread = out.step * spread_ * expected_maximum(fabric_.world());
  out.step += out.spread;
  return out;
}

StepEstimate estimate_step(const Config& c, plan::StagePlans plans, const ModeledDevice& device,
                           std::span<const ClusterNode> nodes, double expert_load) {
  return DryStages(c, std::move(plans), device, nodes, expert_load).estimate();
}

}  // namespace nrl::predict
