#pragma once
// Samples of text during training (logger.sample_period).

#include <memory>
#include <string>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/train/text_generator.h"

namespace nrl::train {

/// Continues logger.sample_prompt with the weights of the moment, on the CPU of this rank; of a GPU's weights
/// it keeps a copy in host memory. Draws from a random stream of its own and changes nothing of the run.
class TextSamples {
 public:
  /// Allocates everything; `threads` of the CPU. `config` and `engine` must outlive this. Throws Error
  /// (`config`) where no tokenizer of the run is known, and as TextGenerator.
  TextSamples(const Config& config, engine::Engine& engine, int threads);

  /// The prompt and its continuation. All work of the device must be done.
  std::string sample();

 private:
  const Config& config_;
  engine::Engine& engine_;
  std::unique_ptr<data::Tokenizer> tokenizer_;
  std::vector<cpu::HostMemory> copies_;
  std::vector<Tensor> weights_;
  std::unique_ptr<TextGenerator> generator_;
};

}  // namespace nrl::train
