#pragma once
// Norms of gradients and weights and sizes of activations, by layer of the model: sums of squares that ops
// leave in the memory of the plan (plan::RunPlan::layer_sums), in steps that ask for them.

#include <cstdint>
#include <span>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/monitor/facts.h"

namespace nrl::engine {

/// Looks at one step at a time, which must be collected before the next one begins. The engine must have been
/// planned with logger.layer_stats_period > 0 and must outlive this.
class LayerStatistics {
 public:
  explicit LayerStatistics(Engine& engine);

  /// Before Engine::step(), whose StepInput::gradients_reduced must call gradients_reduced() and which must
  /// be eager. Activations count in training passes, without repetitions for a backward pass.
  void begin();
  void gradients_reduced();
  /// After Engine::step().
  void end();
  /// The sums of this rank, which must be added over all ranks. Blocks until the step is done.
  std::vector<double> sums();
  /// From the sums of all ranks: grad_norm, before clipping, and weight_norm, before the update, of the
  /// parameters that are trained; the root mean squares of the residual stream that enters a block
  /// (residual_rms) and of what its parts add to it, before dropout (attention_rms; mlp_rms, also of
  /// experts). `loss_scale`: StepResult::used_loss_scale.
  monitor::LayerTable table(std::span<const double> sums, double loss_scale) const;

 private:
  void add(const Tensor& x, int64_t layer, int kind);

  Engine& engine_;
  Tensor sums_;
  int64_t layers_;                 // with the embedding and the head
  std::vector<int> of_parameter_;  // layer, by parameter
  std::vector<int> of_slot_;       // index into the sums, by slot of the rank; -1: none
  std::vector<double> rows_;       // by index into the sums: elements of activations
  model::ResultsWatch before_;
};

}  // namespace nrl::engine
