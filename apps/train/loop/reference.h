#pragma once
// Log-probabilities of a reference model, which objectives compare the policy with. The reference is the
// model that a run begins with; its numbers are computed once, before the first step, and kept in a file.

#include <memory>

#include "apps/data/examples/rollout_set.h"
#include "apps/data/examples/sequence_numbers.h"
#include "apps/engine/engine.h"
#include "apps/monitor/start_phases.h"
#include "apps/train/start/run.h"

namespace nrl::train {

/// Collective. The log-probabilities of all `examples` under the weights in the engine, the same on all
/// ranks: of each row, or the sum over each sequence.
std::shared_ptr<const data::SequenceNumbers> compute_log_probs(const Config& config, engine::Engine& engine,
                                                               std::shared_ptr<const data::Examples> examples,
                                                               data::SequenceNumbers::Kind kind,
                                                               const parallel::Groups& groups);

/// The same under the model that training began with: without the adapters, or with the weights that
/// Engine::keep_reference() kept.
std::shared_ptr<const data::SequenceNumbers> compute_reference(const Config& config, engine::Engine& engine,
                                                               std::shared_ptr<const data::Examples> examples,
                                                               data::SequenceNumbers::Kind kind,
                                                               const parallel::Groups& groups);

/// Another model than the policy that rollouts are compared with, or the teacher that a student learns from
/// (reference.model_name), with weights and memory of its own, divided over the ranks as the policy is.
class ReferenceModel {
 public:
  /// Collective. `run` must outlive the model. Fails with Exit::config if its vocabulary is another than the
  /// policy's or it has too few positions, Exit::out_of_memory if it does not fit beside the policy, and as
  /// load_model_directory() does.
  explicit ReferenceModel(Run& run);

  /// Collective. By row, the same on all ranks, in the policy's temperature.
  std::shared_ptr<const data::SequenceNumbers> log_probs(std::shared_ptr<const data::Examples> examples);
  /// Collective, of a teacher (algorithm distill). Sets the rollouts' numbers of the teacher, distill.topk of
  /// each token with a loss, the same on all ranks. Fails with Exit::data if they are not finite.
  void teach(const std::shared_ptr<data::RolloutSet>& rollouts);
  int64_t bytes() const { return engine_->plan().memory.total_bytes(); }

 private:
  const Run& run_;
  std::unique_ptr<engine::Engine> engine_;
};

/// Collective, after set_up_run(), if the objective needs a reference: keeps the weights that the run begins
/// with in the engine, for rollouts that it generates (plan::keeps_reference()); for examples sets
/// TrainData::reference and ValidationData::reference, from their files where these fit, else with the
/// weights that the run begins with. A run that was resumed loads these first, and its checkpoint again
/// afterwards. Files lie beside the caches of the examples; one that cannot be written is a warning.
void prepare_references(Run& run, monitor::StartPhases& phases);

}  // namespace nrl::train
