#pragma once
// Computes the loss of a stored model on token files and on files of records, on any layout of the ranks:
// forward passes over consecutive windows, or over packed examples, which data-parallel ranks divide.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "apps/data/examples/example_set.h"
#include "apps/engine/engine.h"
#include "apps/train/loop/step_source.h"
#include "apps/train/start/evaluation_config.h"
#include "apps/train/start/placement.h"
#include "core/io/indexed_dataset.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

/// Sums over the targets of a dataset.
struct EvaluationSums {
  double negative_log_prob = 0;  ///< natural logarithm
  int64_t tokens = 0;            ///< targets with a loss
  double loss() const { return negative_log_prob / static_cast<double>(tokens); }
};

/// The sums depend on the number of ranks and their layout by the rounding of the passes only: the loss by at
/// most 1e-6 of itself with weights in f32.
class StoredModelEvaluator {
 public:
  /// Collective: every rank loads its part of the model, in its stored dtype. Errors end in AgreedExit on all
  /// ranks. `world` must outlive the evaluator.
  StoredModelEvaluator(comm::World& world, const EvaluationOptions& options);

  /// Collective. Reads the documents of `data` as one stream in windows of sequence_length() tokens, as in
  /// training. Every token of the first `max_tokens` (0: all) except the very first is predicted once, from
  /// the preceding tokens of its window, without dropout.
  EvaluationSums run(const IndexedDataset& data, int64_t max_tokens);

  /// Collective: the examples of a file of records, with EvaluationOptions::examples.
  std::shared_ptr<const data::ExampleSet> open_examples(const std::string& path);
  /// Collective. The loss of the tokens that training on `examples` would predict. `sequence`: of every
  /// example, where it has several (a preference: the chosen one, then the rejected one).
  EvaluationSums run(const std::shared_ptr<const data::Examples>& examples, int sequence = 0);

  const model::ModelSpec& spec() const { return plan().spec; }
  int64_t sequence_length() const { return plan().sequence_length; }
  DType dtype() const { return plan().recipe.weights(); }
  int64_t parameters() const { return plan().whole().total(); }
  const plan::RunPlan& plan() const { return engine_->plan(); }
  const Config& config() const { return placed_->config.config; }

 private:
  struct Placed {
    Placed(comm::World& world, ConfigResult checked) : config(std::move(checked)), placement(world, config) {}
    ConfigResult config;
    Placement placement;
  };
  void load(model::ModelSpec spec);
  EvaluationSums sum_of(StepSource& source, int64_t steps);

  comm::World& world_;
  EvaluationOptions options_;
  std::optional<Placed> placed_;  // outlives the engine
  std::unique_ptr<engine::Engine> engine_;
};

}  // namespace nrl::train
