#pragma once
// Sampling text from a model: what `generate` prints, and the samples of a training run.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/tokenizer.h"
#include "apps/model/inference.h"

namespace nrl::train {

struct SamplingOptions {
  double temperature = 0.8;  ///< 0: the likeliest token
  int64_t top_k = 0;         ///< only the K likeliest tokens; 0: all
  double top_p = 1.0;        ///< only the likeliest tokens with this total probability
  uint64_t seed = 0;
};

/// Index of a token drawn from the softmax of `logits` / temperature, cut by top-k, then by top-p. `uniform`
/// lies in [0, 1). `order` is scratch memory.
int32_t sample_token(std::span<const float> logits, const SamplingOptions& options, float uniform,
                     std::vector<int32_t>& order);

/// The text of a growing sequence of tokens, in pieces that end with a whole character.
class TextStream {
 public:
  /// `prompt` is what the text continues; its own text counts as shown.
  TextStream(const data::Tokenizer& tokenizer, std::vector<int32_t> prompt);
  /// What `id` adds; empty while a character's last bytes are missing.
  std::string append(int32_t id);

 private:
  const data::Tokenizer& tokenizer_;
  std::vector<int32_t> ids_;
  size_t shown_;  ///< bytes of the text
};

/// Continues one prompt, any number of times. Memory is allocated once.
class TextGenerator {
 public:
  /// `weights` are indexed like ParameterList::all, in the memory of `exec`, and are read anew by every run;
  /// all references and the device must outlive the generator. Throws Error (`usage`, `data`) where the
  /// prompt has no tokens, does not fit into the model's positions, or the tokenizer has ids that the model
  /// does not have.
  TextGenerator(const model::ModelSpec& spec, const model::ParameterList& parameters,
                const std::vector<Tensor>& weights, const data::Tokenizer& tokenizer, std::string_view prompt,
                int64_t max_tokens, const ops::Exec& exec);

  /// Calls `print` with the pieces of the continuation as soon as their last character is complete.
  void run(const SamplingOptions& options, const std::function<void(std::string_view)>& print);

 private:
  const data::Tokenizer& tokenizer_;
  std::vector<int32_t> prompt_;
  int64_t max_tokens_;
  std::unique_ptr<model::Inference> inference_;
};

/// An exec on the CPU with `threads` threads and the best instruction set.
ops::Exec cpu_exec(int threads);

}  // namespace nrl::train
