#pragma once
// Text samples during training (logger.sample_period).

#include <memory>
#include <string>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/train/loop/text_generator.h"

namespace nrl::train {

/// Continues or answers logger.sample_prompt with the current weights, on the CPU of this rank; weights of a
/// GPU are copied to host memory. Uses its own random stream and does not affect the run.
class TextSamples {
 public:
  /// Allocates all memory. `chat`: the examples of the run are conversations, and the samples answers to the
  /// prompt as a user message. `threads`: CPU threads. `config` and `engine` must outlive this object. Throws
  /// Error (`config`) if the run's tokenizer is unknown, `data` if the chat template refuses the prompt, and
  /// as TextGenerator.
  TextSamples(const Config& config, engine::Engine& engine, bool chat, int threads);

  /// Returns the prompt and its continuation, or the prompt and, on the next line, the answer. No step may be
  /// in flight.
  std::string sample();

 private:
  const Config& config_;
  engine::Engine& engine_;
  bool chat_;
  std::unique_ptr<data::Tokenizer> tokenizer_;
  std::vector<cpu::HostMemory> copies_;
  std::vector<Tensor> weights_;
  std::unique_ptr<TextGenerator> generator_;
};

}  // namespace nrl::train
