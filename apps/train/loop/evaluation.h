#pragma once
// Computes the loss of a stored model on token files: forward passes over consecutive windows, which are
// distributed over the ranks.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/train/start/placement.h"
#include "core/io/indexed_dataset.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

struct EvaluationOptions {
  std::string directory;        ///< checkpoint (step-N) or Hugging Face directory
  int64_t sequence_length = 0;  ///< of a window; 0: as in training, else the model's maximum up to 1024
  int64_t micro_batch = 4;      ///< windows per forward pass, or fewer if the data have fewer
  int64_t tokens = INT64_MAX;   ///< most tokens of a dataset that is evaluated
  DeviceType device = DeviceType::cpu;
  int threads = 0;  ///< 0: this rank's share of the cores
};

/// Sums over the tokens of a dataset.
struct EvaluationSums {
  double negative_log_prob = 0;  ///< natural logarithm
  int64_t tokens = 0;            ///< predicted tokens
  double loss() const { return negative_log_prob / static_cast<double>(tokens); }
};

class StoredModelEvaluator {
 public:
  /// Collective: loads the model on every rank, in its stored dtype. Errors end in AgreedExit on all ranks.
  StoredModelEvaluator(comm::World& world, const EvaluationOptions& options);

  /// Collective. Reads the documents of `data` as one stream in windows of sequence_length() tokens, as in
  /// training. Every token of the first `max_tokens` (0: all) except the very first is predicted once, from
  /// the preceding tokens of its window, without dropout. Up to rounding in double, the sums do not depend on
  /// the number of ranks.
  EvaluationSums run(const IndexedDataset& data, int64_t max_tokens);

  const model::ModelSpec& spec() const { return engine_->plan().spec; }
  int64_t sequence_length() const { return options_.sequence_length; }
  DType dtype() const { return engine_->plan().recipe.weights(); }
  int64_t parameters() const { return engine_->plan().whole.total(); }

 private:
  void load();

  comm::World& world_;
  EvaluationOptions options_;
  RankDevice device_;  // outlives the engine
  std::unique_ptr<engine::Engine> engine_;
};

}  // namespace nrl::train
