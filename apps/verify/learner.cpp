#include "apps/verify/learner.h"

#include <utility>

#include "apps/state/run_state.h"
#include "apps/train/launch/launch.h"
#include "apps/train/loop/evaluator.h"
#include "apps/train/start/initial_state.h"
#include "apps/train/start/run_data.h"
#include "apps/verify/limits.h"
#include "core/base/error.h"

namespace nrl::verify {

Learner::Learner(comm::World& world, Setting setting, const train::TrainData& data,
                 std::unique_ptr<plan::RunPlan> plan)
    : world_(world), setting_(std::move(setting)), data_(data) {
  engine_ =
      std::make_unique<engine::Engine>(std::move(plan), setting_.options, *setting_.groups, setting_.exec);
}

namespace {

void require_kernels(engine::Engine& engine) {
  engine.require_kernels(engine.objective(), engine.exec().device ? "the GPU" : "the CPU");
}

}  // namespace

void Learner::initialize(train::VerifyShare share) {
  engine_->register_memory();
  monitor::StartPhases phases;
  train::load_initial_weights(setting_.config.config, *engine_, share, setting_.threads, phases,
                              [&] { require_kernels(*engine_); });
}

void Learner::open(int64_t first, int64_t count) {
  source_.reset();
  source_ = source((first - 1) * plan().batch.global, count);
  next_ = first;
}

std::unique_ptr<train::StepSource> Learner::source(int64_t consumed_samples, int64_t steps) const {
  return train::training_source(setting_.config.config, data_, plan(), *setting_.groups, consumed_samples,
                                steps);
}

engine::StepInput Learner::next_step() {
  const train::StepSource::Totals totals = train::fill_step(*engine_, *source_).totals;
  in_flight_.push_back(totals);
  return {.number = next_++, .learning_rate = learning_rate, .loss_tokens = totals.loss_tokens};
}

Outcome Learner::collect() {
  const engine::StepResult result = train::collect_step(world_, *engine_);
  setting_.groups->check();  // replayed graphs report no errors themselves
  const train::StepSource::Totals totals = in_flight_.front();
  in_flight_.erase(in_flight_.begin());
  const BatchPlan& batch = plan().batch;
  ++position_.step;
  position_.consumed_samples += batch.global;
  position_.tokens += totals.tokens;
  position_.updates = result.updates;
  position_.skipped += result.skipped ? 1 : 0;
  position_.skipped_in_a_row = result.skipped_in_a_row;
  position_.loss_scale = result.loss_scale;
  position_.clean_steps = result.clean_steps;
  return {.loss = objective().loss(result.metrics, totals.counts()),
          .norm = result.grad_norm,
          .loss_scale = result.loss_scale,
          .skipped = result.skipped,
          .expert_rounds = result.expert_rounds};
}

std::vector<Outcome> Learner::train(int64_t first, int64_t count) {
  open(first, count);
  std::vector<Outcome> out;
  for (int64_t s = 0; s < count; ++s) {
    engine_->step(next_step(), objective());
    const size_t leave = engine_->exec().device && s + 1 < count ? 1 : 0;
    while (in_flight_.size() > leave) out.push_back(collect());
  }
  return out;
}

double Learner::evaluate(int64_t batch) {
  const auto validation = source((batch - 1) * plan().batch.global, 1);
  return train::mean_metrics(*engine_, *validation, 1, *setting_.groups).front();
}

std::string Learner::save(const std::string& store, const RankGroup& group) {
  std::unique_ptr<Staging> staging = engine_->staging();
  position_.global_batch = plan().batch.global;
  position_.dataset_samples = data_.samples;
  const train::SaveOptions options{.store = store,
                                   .resolved_config = dump_resolved(setting_.config),
                                   .run = train::record_to_json({}),
                                   .hf = {},
                                   .base = setting_.config.config.policy.model_name.value_or("")};
  return train::save_checkpoint(train::state_of(*engine_, staging.get()), position_, options, group);
}

void Learner::restart() {
  source_.reset();
  engine_.reset();
  engine_ = std::make_unique<engine::Engine>(setting_.make_plan(), setting_.options, *setting_.groups,
                                             setting_.exec);
  require_kernels(*engine_);
}

void Learner::load(const std::string& checkpoint) {
  engine_->register_memory();
  CheckpointReader reader(checkpoint);
  position_ = train::read_position(reader);
  train::with_state(*engine_, [&](const train::TrainState& state) {
    train::load_base_of_adapters(setting_.config.config, plan(), setting_.threads, state);
    train::load_checkpoint(reader, state);
  });
  engine_->restore({.updates = position_.updates,
                    .skipped_in_a_row = position_.skipped_in_a_row,
                    .loss_scale = position_.loss_scale,
                    .clean_steps = position_.clean_steps});
}

}  // namespace nrl::verify
