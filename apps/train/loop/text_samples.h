#pragma once
// Text samples during training (logger.sample_period).

#include <memory>
#include <string>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/train/loop/text_generator.h"

namespace nrl::train {

/// Continues logger.sample_prompt with the current weights, on the CPU of this rank; weights of a GPU are
/// copied to host memory. Uses its own random stream and does not affect the run.
class TextSamples {
 public:
  /// Allocates all memory. `threads`: CPU threads. `config` and `engine` must outlive this object. Throws
  /// Error (`config`) if the run's tokenizer is unknown, and as TextGenerator.
  TextSamples(const Config& config, engine::Engine& engine, int threads);

  /// Returns the prompt and its continuation. No step may be in flight.
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
