#include "apps/verify/reference.h"

#include <array>

#include "apps/plan/memory_check.h"
#include "apps/plan/recompute.h"
#include "core/base/text.h"
#include "core/device/cpu/memory.h"

namespace nrl::verify {

ConfigResult reference_config(const ConfigResult& config) {
  ConfigResult out = config;
  Config& c = out.config;
  c.distributed = DistributedConfig{};
  c.distributed.overlap_grad_reduce = false;
  c.cluster = {};
  c.policy = plan::with_open_recompute(c.policy);
  c.policy.recompute.granularity = RecomputeGranularity::none;
  c.policy.offload_optimizer = {};
  c.policy.offload_activations = {};
  c.policy.offload_layers.reset();
  c.policy.offload_modules.clear();
  c.policy.cuda_graph = false;
  c.policy.sequence_packing = {};
  c.policy.dynamic_batching = {};
  c.policy.fp8_cfg.fp8_param = false;
  c.policy.fp8_cfg.cache_weights = {};
  // Without master weights the reference has none either: it goes on from the run's checkpoints.
  c.policy.optimizer.use_precision_aware_optimizer = c.policy.optimizer.main_params_dtype != DType::f32;
  c.policy.optimizer.exp_avg_dtype = c.policy.optimizer.exp_avg_sq_dtype = DType::f32;
  c.policy.optimizer.main_grads_dtype = DType::f32;
  c.policy.gradient_accumulation_steps = std::nullopt;
  return out;
}

BatchPlan reference_batch(const BatchPlan& batch, bool global_aux_loss) {
  BatchPlan out = batch;
  out.data_parallel = 1;
  if (global_aux_loss) out.micro *= batch.data_parallel;
  out.accumulation = out.global / out.micro;
  return out;
}

std::unique_ptr<plan::RunPlan> make_reference_plan(const ConfigResult& config, const plan::RunPlan& plan,
                                                   const train::Placement& placement, int local_ranks) {
  const ConfigResult alone = reference_config(config);
  const model::MoeSpec& moe = plan.spec.moe;
  const BatchPlan batch =
      reference_batch(plan.batch, moe.aux_tokens == model::AuxLoss::global && moe.aux_loss > 0);
  const bool gpu = placement.device() == DeviceType::cuda;
  const plan::CategoryBytes own = plan::planned_memory(config.config, plan);
  double own_total = 0;
  for (const double bytes : own) own_total += bytes;
  const double capacity = gpu ? static_cast<double>(placement.capacity())
                              : static_cast<double>(cpu::machine_memory()) - (local_ranks - 1) * own_total;
  const std::string owner = fmt::format("{} ({} and the reference run)", gpu ? "the GPU" : "this machine",
                                        gpu ? "a rank" : counted(local_ranks, "rank"));
  const auto require = [&](plan::CategoryBytes need) {
    for (size_t i = 0; i < need.size(); ++i) need[i] += own[i];
    if (const auto shortage = plan::memory_shortage(alone, plan.spec, batch, need, capacity, owner))
      raise({*shortage});
  };
  require(plan::minimum_memory(alone.config, plan.spec, batch, placement.device()));
  auto made = plan::make_run_plan(alone.config, plan.spec, batch, plan::grid_position(alone.config, 1, 0),
                                  placement.device(), placement.host_threads());
  require(plan::planned_memory(alone.config, *made));
  return made;
}

ReferenceGroups make_reference_groups(comm::World& world, const train::Placement& placement) {
  ReferenceGroups out;
  const plan::GridPosition position = plan::grid_position(Config{}, 1, 0);
  const std::array self{0};
  out.self = world.comm().subgroup(self, "reference");
  std::optional<parallel::DeviceGroups> devices;
  if (placement.exec().device) devices = parallel::DeviceGroups{.runtime = placement.exec().device};
  out.groups = std::make_unique<parallel::Groups>(position.grid, *out.self,
                                                  plan::needed_groups(Config{}, position, false), devices);
  return out;
}

engine::TrainingOptions reference_options(const engine::TrainingOptions& options) {
  engine::TrainingOptions alone = options;
  alone.overlap_grad_reduce = alone.overlap_param_gather = alone.cuda_graph = false;
  return alone;
}

}  // namespace nrl::verify
