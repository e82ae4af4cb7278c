// How a Session gets its state: from a checkpoint, from a model directory, or from the seed.
#include <algorithm>
#include <utility>

#include "apps/train/session.h"
#include "core/device/cpu/parallel.h"
#include "core/io/checkpoint_store.h"

namespace nrl::train {

void Session::initialize() {
  const CheckpointingConfig& c = config().checkpointing;
  // Rank 0 chooses the checkpoint; all read it.
  std::string path;
  together(world_, [&] {
    if (world_.rank() != 0) return;
    CheckpointChoice choice = choose_checkpoint(c);
    path = std::move(choice.path);
    warnings_.insert(warnings_.end(), choice.warnings.begin(), choice.warnings.end());
  });
  world_.comm().broadcast_text(path, 0);
  if (path.empty())
    together(world_, [&] { start_from_initial_weights(); });
  else
    resume_from(path);
  // Nothing in the store was touched before it was certain that this run starts.
  together(world_, [&] {
    if (world_.rank() != 0 || !c.enabled) return;
    const RunLock& lock = locks_->of(c.checkpoint_dir);
    clean_store(c.checkpoint_dir, lock);
    const std::string moved = set_other_checkpoints_aside(c, path, lock);
    if (!moved.empty()) warnings_.push_back(moved);
  });
}

void Session::start_from_initial_weights() {
  const std::optional<std::string>& model = config().policy.model_name;
  // One rank of each node, since every node may have a copy of its own.
  if (model && world_.local_rank() == 0) verify_model_directory(*model);
  scalars_.restore(0, 0);
  with_host_state(HostState::weights, [&](const TrainState& state) {
    if (model)
      load_weights(*model, plan_->spec, plan_->parameters, state.weights);
    else
      make_initial_weights(state);
  });
  if (!flat_.master) return;
  // Masters start from the rounded weights, so that the first step sees what the layers see.
  for (const plan::OwnedRange& r : plan_->owned)
    ops::convert(exec_, flat_.weights.rows(r.flat, r.count), flat_.master.rows(r.state, r.count));
}

void Session::resume_from(const std::string& path) {
  const std::vector<std::string> manifests =
      world_.comm().gather_texts(to_text({identify_input(join_path(path, kManifestName))}));
  together(world_, [&] { require_same_files(manifests, world_.hosts()); });
  together(world_, [&] {
    CheckpointReader reader(path);
    const Position saved = read_position(reader);
    const SavedRecord before = read_record(reader, saved.global_batch);
    if (!before.incomplete.empty()) warnings_.push_back(before.incomplete);
    changes_ = compare_records(before.record, record_, config().checkpointing.allow_changes, path);
    with_host_state(HostState::loaded, [&](const TrainState& state) { load_checkpoint(reader, state); });
    resumed_from_ = path;
    restore_position(saved);
    scalars_.restore(saved.updates, saved.skipped_in_a_row);
  });
}

void Session::make_initial_weights(const TrainState& state) const {
  const plan::RunPlan& p = *plan_;
  std::vector<float> values;
  for (size_t i = 0; i < p.parameters.all.size(); ++i) {
    const model::Parameter& parameter = p.parameters.all[i];
    for (const model::Part& part : parameter.parts) {
      const bool direct = p.recipe.weights == DType::f32;
      if (!direct) values.resize(static_cast<size_t>(part.numel()));
      float* out = direct ? state.weights[i].ptr<float>() + part.offset : values.data();
      initial_values(p.spec, parameter, part, static_cast<uint64_t>(config().pretrain.seed), 0, part.numel(),
                     out, host_threads_);
      if (direct) continue;
      bf16* low = state.weights[i].ptr<bf16>() + part.offset;
      cpu::parallel_for(host_threads_, part.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
        for (int64_t e = begin; e < end; ++e) low[e] = bf16(values[static_cast<size_t>(e)]);
      });
    }
  }
}

void Session::restore_position(const Position& saved) {
  const int64_t global = plan_->batch.global;
  const Position fresh = std::exchange(position_, saved);
  position_.global_batch = global;
  position_.dataset_samples = fresh.dataset_samples;
  const int64_t needed = saved.consumed_samples + std::max<int64_t>(max_steps() - saved.step, 0) * global;
  if (needed > train_.samples) {
    train_ = open_train_data(config(), plan_->spec.vocab_size, global, needed);
    position_.dataset_samples = train_.samples;
  }
  // Within one epoch the order is the same however many samples are asked for; Megatron's order of several
  // epochs is not.
  if (position_.dataset_samples != saved.dataset_samples &&
      std::max(position_.dataset_samples, saved.dataset_samples) > train_.epoch_samples)
    changes_.push_back(fmt::format(
        "sample order: made for {} samples -> for {}, more than one epoch of {} (samples may repeat or "
        "be missed)",
        saved.dataset_samples, position_.dataset_samples, train_.epoch_samples));
}

}  // namespace nrl::train
