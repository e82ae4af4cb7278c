#pragma once
// The loss of a trained model on token files: the decoder's forward pass over consecutive windows, shared
// among the ranks.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "apps/model/decoder.h"
#include "apps/plan/batch.h"
#include "apps/train/accelerator.h"
#include "core/io/indexed_dataset.h"
#include "parallel/comm/world.h"

namespace nrl::train {

struct EvaluationOptions {
  std::string directory;        ///< checkpoint (step-N) or Hugging Face directory
  int64_t sequence_length = 0;  ///< of a window; 0: that of the training, else the model's longest up to 1024
  int64_t micro_batch = 4;      ///< windows at once
  DeviceType device = DeviceType::cpu;
  int threads = 0;  ///< 0: this rank's share of the cores
};

/// Sums over the tokens of a data set.
struct EvaluationSums {
  double negative_log_prob = 0;  ///< natural logarithm
  int64_t tokens = 0;            ///< predicted tokens
  double loss() const { return negative_log_prob / static_cast<double>(tokens); }
};

class Evaluator {
 public:
  /// Collective: loads the model on every rank, in the dtype it is stored in. Errors are agreed on (Leave).
  Evaluator(comm::World& world, const EvaluationOptions& options);

  /// Collective. Reads the documents of `data` as one stream in windows of sequence_length() tokens, as
  /// training does; every token of the first `max_tokens` (0: all) but the stream's first is predicted once,
  /// from the tokens before it in its window. Without dropout. The sums do not depend on the number of ranks
  /// beyond the rounding of double.
  EvaluationSums run(const IndexedDataset& data, int64_t max_tokens);

  const model::ModelSpec& spec() const { return spec_; }
  int64_t sequence_length() const { return options_.sequence_length; }
  DType dtype() const { return recipe_.weights; }
  int64_t parameters() const { return parameters_.total(); }

 private:
  void load(const std::vector<std::vector<std::string>>& seen);

  comm::World& world_;
  EvaluationOptions options_;
  Accelerator accelerator_;  // outlives everything that uses the device
  model::ModelSpec spec_;
  model::ParameterList parameters_;
  precision::Recipe recipe_;
  memory::MemoryPlan memory_;
  std::unique_ptr<plan::BatchTensors> tensors_;
  std::unique_ptr<model::Decoder> decoder_;
  memory::Arenas arenas_;
  ops::Exec exec_;
  Tensor sum_;  ///< (1) f64
};

}  // namespace nrl::train
