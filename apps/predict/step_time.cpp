#include "apps/predict/step_time.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "apps/machine/call_time.h"
#include "apps/plan/pipeline.h"
#include "apps/plan/traffic.h"
#include "core/base/error.h"
#include "core/device/dry_run.h"
#include "core/ops/libraries.h"
#include "parallel/grid/nodes.h"
#include "parallel/pipeline/simulate.h"

namespace nrl::predict {
namespace {

/// Seconds that a stage computes.
struct StageSeconds {
  std::vector<pipeline::ChunkCosts> chunks;  ///< of one microbatch
  double update = 0;                         ///< once a step

  double microbatch() const {
    double sum = 0;
    for (const pipeline::ChunkCosts& c : chunks) sum += c.forward + c.backward_data + c.backward_weight;
    return sum;
  }
  double backward() const {
    double sum = 0;
    for (const pipeline::ChunkCosts& c : chunks) sum += c.backward_data + c.backward_weight;
    return sum;
  }
};

StageSeconds stage_seconds(std::span<const ops::Call> calls, const model::Decoder& decoder,
                           const machine::DeviceModel& device, const model::ModelLayout& layout,
                           int64_t microbatches) {
  using program::StepKind;
  StageSeconds out;
  out.chunks.assign(static_cast<size_t>(layout.chunks),
                    {.forward = 0, .backward_data = 0, .backward_weight = 0});
  const program::Program& program = decoder.program(memory::training);
  for (const ops::Call& call : calls) {
    const double seconds =
        estimate(device, call, machine::likely).seconds() + machine::launch_gap * call.cost.launches;
    const program::Step* const s = call.step < 0 ? nullptr : &program.steps[call.step];
    if (!s || (!s->of_microbatch() && s->buckets == 0)) {
      out.update += seconds;
      continue;
    }
    pipeline::ChunkCosts& chunk = out.chunks[s->chunk];
    const bool weight = s->kind == StepKind::compute && decoder.step(*s).pass == memory::Pass::weight;
    (weight                    ? chunk.backward_weight
     : s->backward || s->again ? chunk.backward_data
                               : chunk.forward) += seconds;
  }
  const auto n = static_cast<double>(microbatches);
  for (pipeline::ChunkCosts& c : out.chunks) {
    c.forward /= n;
    c.backward_data /= n;
    c.backward_weight /= n;
  }
  return out;
}

/// Seconds of a step's communication by purpose.
struct CommSeconds {
  double layers = 0, message = 0, gradients = 0, weights = 0, scalars = 0;
  double gradient_latency = 0, weight_latency = 0;  ///< of their operations, in the sums above
};

/// The link that limits an operation of a group. Rings pass through all ranks of a node before they leave it,
/// over the adapters of all of them; blocks for single ranks go through the sender's.
machine::LinkModel link_of(const machine::DeviceModel& device, const parallel::ProcessGrid& grid,
                           const plan::Traffic& traffic, std::span<const int> node_of) {
  const parallel::GroupsOnNodes on = groups_on_nodes(grid, traffic.group, node_of);
  if (on.spanning == 0) return device.node;
  const bool ring = traffic.op == comm::Op::all_reduce || traffic.op == comm::Op::all_gather ||
                    traffic.op == comm::Op::reduce_scatter;
  const auto home = std::count_if(on.first.begin(), on.first.end(),
                                  [&](int rank) { return node_of[rank] == node_of[on.first.front()]; });
  const double adapters = ring ? static_cast<double>(home) : 1;
  return {std::min(device.node.bandwidth, adapters * device.network.bandwidth), device.network.latency};
}

CommSeconds comm_seconds(std::span<const plan::Traffic> traffic, const parallel::ProcessGrid& grid,
                         const machine::DeviceModel& device, std::span<const int> node_of,
                         double expert_load) {
  CommSeconds out;
  for (const plan::Traffic& t : traffic) {
    const machine::LinkModel link = link_of(device, grid, t, node_of);
    const double wire = t.balanced() ? t.wire() * expert_load : t.wire();
    const double latency = static_cast<double>(t.count) * link.latency;
    const double seconds = latency + wire / link.bandwidth;
    switch (t.purpose) {
      case comm::Purpose::layers:
      case comm::Purpose::experts:
        out.layers += seconds;
        break;
      case comm::Purpose::messages:
        out.message = std::max(out.message, link.latency + static_cast<double>(t.bytes) /
                                                               static_cast<double>(t.count) / link.bandwidth);
        break;
      case comm::Purpose::gradients:
        out.gradients += seconds;
        out.gradient_latency += latency;
        break;
      case comm::Purpose::weights:
        out.weights += seconds;
        out.weight_latency += latency;
        break;
      case comm::Purpose::scalars:
        out.scalars += seconds;
        break;
    }
  }
  return out;
}

/// The seconds of communication in `pieces` that remain visible behind `work` seconds of computation: at
/// least the last piece, which nothing follows.
double exposed(double seconds, double work, size_t pieces) {
  return std::max(seconds - work, seconds / static_cast<double>(std::max<size_t>(pieces, 1)));
}

double exposed_data(const Config& config, const plan::RunPlan& plan, const StageSeconds& stage,
                    const CommSeconds& comm, const machine::DeviceModel& device) {
  const DistributedConfig& d = config.distributed;
  size_t buckets = 0;
  bool gradients_sharded = false, weights_gathered = false;
  for (const plan::ParamGroup& g : plan.groups) {
    buckets += g.layout.buckets().size();
    gradients_sharded = gradients_sharded || g.gradients_sharded;
    weights_gathered = weights_gathered || g.weights_gathered;
  }
  const auto microbatches = static_cast<double>(plan.batch.accumulation);
  // Whole gradients are final in the last microbatch; shards are summed in every one.
  const double backward = stage.backward() * (gradients_sharded ? microbatches : 1);
  const double passes = weights_gathered ? stage.microbatch() * microbatches : stage.microbatch();
  // A rank on a CPU starts an operation on the processors that compute.
  const auto overlapped = [&](double seconds, double latency, double work) {
    const double visible = device.gpu() ? 0 : latency;
    return visible + exposed(seconds - visible, work, buckets);
  };
  return (d.overlap_grad_reduce ? overlapped(comm.gradients, comm.gradient_latency, backward)
                                : comm.gradients) +
         (d.overlap_param_gather ? overlapped(comm.weights, comm.weight_latency, passes) : comm.weights);
}

}  // namespace

ModeledDevice::ModeledDevice(const machine::DeviceModel& model, bool tf32, int threads)
    : ops::DryDevice(model.gpu() ? ops::DryDevice(model.properties(), {.tf32 = tf32}, threads)
                                 : ops::DryDevice(threads)),
      model_(model) {}

int64_t StagePlans::memory() const {
  int64_t most = 0;
  for (const auto& plan : plans) most = std::max(most, plan->memory.total_bytes());
  return most;
}

StagePlans plan_stages(const Config& c, const model::ModelSpec& spec, int world, const ModeledDevice& device,
                       double capacity) {
  const BatchPlan batch = resolve_batch(c, world);
  const auto stages = static_cast<int>(c.distributed.pipeline_parallel_size);
  const auto memory = static_cast<size_t>(capacity / c.memory.max_memory);
  StagePlans out;
  for (const int stage : {0, 1, stages - 1}) {
    if (stage >= stages || (!out.stages.empty() && stage <= out.stages.back())) continue;
    out.stages.push_back(stage);
    // Stages are the slowest axis.
    out.plans.push_back(plan::make_run_plan(c, spec, batch,
                                            plan::grid_position(c, world, world / stages * stage),
                                            device.type(), device.threads(), {}, memory));
  }
  return out;
}

StepEstimate estimate_step(const Config& c, StagePlans plans, const ModeledDevice& device,
                           std::span<const ClusterNode> nodes, double expert_load) {
  const std::vector<int> node_of = parallel::node_of_ranks(nodes);
  const model::ModelLayout layout = plans.plans.front()->layout;
  const int64_t microbatches = plans.plans.front()->batch.accumulation;
  pipeline::Costs costs(static_cast<size_t>(layout.model_chunks()));
  StepEstimate out;
  double afterwards = 0;  // the longest update with its exposed communication
  for (size_t i = 0; i < plans.stages.size(); ++i) {
    model::Decoder& decoder = *plans.plans[i]->decoder;
    engine::Engine engine(std::move(plans.plans[i]), engine::training_options(c), device.exec());
    engine::DryStep step = engine.dry_step(engine.objective(), true);
    // The traffic assumes an even router; comm_seconds() scales it.
    const CommSeconds comm =
        comm_seconds(step.traffic, engine.plan().position.grid, device.model(), node_of, expert_load);
    if (expert_load != 1) {
      decoder.set_expert_load(expert_load);
      step = engine.dry_step(engine.objective(), true);
    }
    StageSeconds stage =
        stage_seconds(step.calls, decoder, device.model(), engine.plan().layout, microbatches);
    const double data = exposed_data(c, engine.plan(), stage, comm, device.model());
    const double compute = stage.microbatch() * static_cast<double>(microbatches) + stage.update;
    if (compute + comm.layers + data > out.compute + out.layers + out.data) {
      out.compute = compute;
      out.layers = comm.layers + comm.scalars;
      out.data = data;
    }
    afterwards = std::max(afterwards, stage.update + data + comm.scalars);
    // As much in the forward as in the backward pass, evenly over the chunks.
    const double share =
        comm.layers / static_cast<double>(microbatches) / static_cast<double>(stage.chunks.size());
    for (pipeline::ChunkCosts& chunk : stage.chunks) {
      chunk.forward += share / 2;
      chunk.backward_data += share / 2;
      chunk.message = comm.message;
    }
    const int until = i + 1 < plans.stages.size() ? plans.stages[i + 1] : layout.stages;
    for (int s = plans.stages[i]; s < until; ++s)
      for (int chunk = 0; chunk < layout.chunks; ++chunk)
        costs[chunk * layout.stages + s] = stage.chunks[chunk];
  }
  if (layout.stages == 1) {
    out.step = out.compute + out.layers + out.data;
    return out;
  }
  const pipeline::ScheduleOptions options = plan::schedule_options(c, layout, microbatches);
  std::vector<pipeline::Schedule> schedules;
  for (int stage = 0; stage < layout.stages; ++stage) schedules.push_back(make_schedule(options, stage));
  const pipeline::Simulation simulation = simulate(schedules, costs);
  NRL_CHECK(simulation.deadlock.empty(), "{}", simulation.deadlock);
  out.step = simulation.makespan + afterwards;
  out.pipeline = std::max(0.0, out.step - out.compute - out.layers - out.data);
  return out;
}

}  // namespace nrl::predict
