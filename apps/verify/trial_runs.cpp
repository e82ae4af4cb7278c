#include "apps/verify/trial_runs.h"

#include <algorithm>
#include <utility>

#include "apps/monitor/timers.h"
#include "apps/plan/memory_check.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/launch.h"
#include "core/base/text.h"

namespace nrl::verify {

TrialRuns::TrialRuns(comm::World& world, const ConfigResult& config, const train::TrainData& data,
                     int64_t updates)
    : world_(world), config_(config), begin_(monitor::Timers::steady_seconds()), placement_(world, config) {
  const Config& c = config.config;
  const auto make_alone = [this](const plan::RunPlan& plan) {
    return make_reference_plan(config_, plan, placement_, world_.local_size());
  };
  decision_.emplace(world, config, placement_);
  std::unique_ptr<plan::RunPlan> plan = decision_->take(), alone;
  train::run_collectively(world, [&] {
    if (world.rank() == 0) alone = make_alone(*plan);
  });
  engine::TrainingOptions options = engine::training_options(c);
  options.optimizer.eps = epsilon(plan->whole().total());
  comparison_.emplace(world.comm(),
                      limits_for(plan->recipe, placement_.device() == DeviceType::cuda && c.kernels.tf32,
                                 c.distributed.grad_reduce_dtype, plan->spec.expert_layers() > 0, updates,
                                 plan->batch.accumulation));
  train::run_collectively(world, [&] {
    Learner::Setting setting{.config = config,
                             .position = placement_.grid_position(),
                             .groups = &placement_.groups(),
                             .options = options,
                             .exec = placement_.exec(),
                             .threads = placement_.host_threads(),
                             .make_plan = [this] { return decision_->take(); }};
    layout_ = std::make_unique<Learner>(world, setting, data, std::move(plan));
    if (!alone) return;
    reference_groups_ = make_reference_groups(world, placement_);
    setting.config = reference_config(config);
    setting.position = plan::grid_position(setting.config.config, 1, 0);
    setting.groups = reference_groups_->groups.get();
    setting.options = reference_options(options);
    setting.make_plan = [this, make_alone] { return make_alone(layout_->plan()); };
    reference_ = std::make_unique<Learner>(world, setting, data, std::move(alone));
  });
  train::run_collectively(world, [&] {
    // The ranks of a node share the verification of its copy.
    layout_->initialize({world.local_rank(), world.local_size()});
    if (reference_) reference_->initialize(train::verify_none);
  });
  comparison_->initial_weights(compare_held(held_weights));
}

std::vector<Difference> TrialRuns::compare_held(HeldTensors (*held)(engine::Engine&)) {
  HeldTensors wanted;
  if (reference_) wanted = held(reference_->engine());
  return compare(world_.comm(), layout_->plan().whole(), reference_ ? &wanted : nullptr,
                 held(layout_->engine()));
}

TrialResult TrialRuns::result() const {
  const plan::RunPlan& plan = layout_->plan();
  TrialResult out;
  out.grid = plan::grid_line(placement_.grid_position(), name_of(config_.config.distributed.shard_strategy));
  out.options = fmt::format("micro {}, accumulate {}", plan.batch.micro, plan.batch.accumulation);
  out.model = fmt::format("{}, {} parameters, {}", name_of(plan.spec.family), grouped(plan.whole().total()),
                          name_of(plan.recipe.activations()));
  out.sequences = plan.batch.global;
  out.length = plan.sequence_length;
  out.checks = comparison_->checks();
  out.steps = comparison_->steps();
  for (const ComparedStep& s : out.steps) out.optimizer_steps = std::max(out.optimizer_steps, s.when.step);
  out.tensors = comparison_->tensors();
  out.seconds = monitor::Timers::steady_seconds() - begin_;
  return out;
}

}  // namespace nrl::verify
