#pragma once
// Samples text from a model, for `generate` and for the samples of a training run.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/tokenizer.h"
#include "apps/model/inference.h"

namespace nrl::train {

struct SamplingOptions {
  double temperature = 0.8;  ///< 0: greedy
  int64_t top_k = 0;         ///< sample from the K most likely tokens; 0: from all
  double top_p = 1.0;        ///< sample from the most likely tokens with this total probability (nucleus)
  uint64_t seed = 0;
};

/// Samples a token from softmax(logits / temperature), restricted by top-k, then by top-p. `uniform`: a
/// random number in [0, 1). `order`: scratch memory.
int32_t sample_token(std::span<const float> logits, const SamplingOptions& options, float uniform,
                     std::vector<int32_t>& order);

/// Decodes a growing sequence of tokens incrementally, in pieces of whole characters.
class TextStream {
 public:
  /// The text of `prompt` counts as already shown.
  TextStream(const data::Tokenizer& tokenizer, std::vector<int32_t> prompt);
  /// The text that `id` adds; empty while the last character is incomplete.
  std::string append(int32_t id);

 private:
  const data::Tokenizer& tokenizer_;
  std::vector<int32_t> ids_;
  size_t shown_;  ///< bytes of the text
};

/// Continues a prompt, any number of times. Memory is allocated once.
class TextGenerator {
 public:
  /// `weights` are indexed like ParameterList::all, in the memory of exec's device, and are read anew by
  /// every run(). All references and the device must outlive the generator. Throws Error (`usage`,
  /// `data`) if the prompt has no tokens or does not fit into the model's positions, or if a token id
  /// exceeds the model's vocabulary.
  TextGenerator(const model::ModelSpec& spec, const model::ParameterList& parameters,
                const std::vector<Tensor>& weights, const data::Tokenizer& tokenizer, std::string_view prompt,
                int64_t max_tokens, const ops::Exec& exec);

  /// Calls `print` with each piece of the continuation as soon as its last character is complete.
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
