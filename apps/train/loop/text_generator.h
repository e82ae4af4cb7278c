#pragma once
// Samples text from a model, for `generate` and for the samples of a training run.

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/chat/chat_prompt.h"
#include "apps/data/tokenizer.h"
#include "apps/rollout/generator.h"

namespace nrl::train {

struct SamplingOptions {
  double temperature = 0.8;  ///< 0: greedy
  int64_t top_k = 0;         ///< sample from the K most likely tokens; 0: from all
  double top_p = 1.0;        ///< sample from the most likely tokens with this total probability (nucleus)
  uint64_t seed = 0;
};

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

/// Ends a growing text before an end text.
class TextEnd {
 public:
  /// `end` must be valid UTF-8; empty: the text has no end.
  explicit TextEnd(std::string end) : end_(std::move(end)) {}
  /// Appends whole characters. Returns what can be shown: text that the end text may begin with is held back.
  std::string append(std::string_view piece);
  /// The text that is held back.
  std::string rest() { return std::exchange(held_, {}); }
  bool reached() const { return reached_; }

 private:
  std::string end_, held_;
  bool reached_ = false;
};

/// Tokens and times of all texts so far.
struct GenerationSpeed {
  int64_t prompt_tokens = 0, decoded_tokens = 0;
  double prefill_seconds = 0, decode_seconds = 0;
  double first_token_seconds = 0;  ///< of the last run
};

/// Continues prompts, any number of times, with a rollout::LocalGenerator. Memory is allocated again only for
/// longer texts, or for more at once.
class TextGenerator {
 public:
  /// `threads`: of the host, as for rollout::LocalGenerator.
  /// `weights` are indexed like ParameterList::all, in the memory of exec's device, and are read anew by
  /// every run(). All references and the device must outlive the generator. Throws Error: `usage` if the
  /// prompt does not fit into the model's positions, `data` if a token id exceeds the model's vocabulary.
  TextGenerator(const model::ModelSpec& spec, const model::ParameterList& parameters,
                const std::vector<Tensor>& weights, const data::Tokenizer& tokenizer, data::Prompt prompt,
                int64_t max_tokens, const ops::Exec& exec, int threads = 0);
  /// Without a prompt, for run_all().
  TextGenerator(const model::ModelSpec& spec, const model::ParameterList& parameters,
                const std::vector<Tensor>& weights, const data::Tokenizer& tokenizer, int64_t max_tokens,
                const ops::Exec& exec, int threads = 0);

  /// Replaces the prompt; allocates more memory if it is longer than all before. Throws as the constructor.
  void set_prompt(data::Prompt prompt);

  /// Calls `print` with each piece of the continuation as soon as its last character is complete. Returns
  /// true if the text came to its end, false after max_tokens or at the model's last position.
  bool run(const SamplingOptions& options, const std::function<void(std::string_view)>& print);

  struct Text {
    std::string text;
    bool ended = false;  ///< as run()
  };
  /// Computes `samples` continuations of each prompt together. Number i, counted over the prompts, equals the
  /// text of run() with the seed options.seed + i. Calls `done` with each, in any order. Throws as
  /// set_prompt().
  void run_all(std::span<const data::Prompt> prompts, int64_t samples, const SamplingOptions& options,
               const std::function<void(size_t, const Text&)>& done);

  const GenerationSpeed& speed() const { return speed_; }
  /// Off: no CUDA graphs, so that a profile has the times of kernels. Before the first prompt.
  void use_graphs(bool on) { graphs_ = on; }

 private:
  int64_t length_of(const data::Prompt& prompt) const;
  void reserve(int64_t longest, int64_t sequences);
  void generate(std::span<const data::Prompt> prompts, int64_t samples, const SamplingOptions& options,
                const std::function<void(size_t, std::string_view)>& print,
                const std::function<void(size_t, bool)>& done);

  const model::ModelSpec& spec_;
  const model::ParameterList& parameters_;
  const std::vector<Tensor>& weights_;
  const data::Tokenizer& tokenizer_;
  data::Prompt prompt_;
  int64_t max_tokens_;
  ops::Exec exec_;
  int threads_;
  std::unique_ptr<rollout::LocalGenerator> generator_;
  int64_t longest_ = 0, sequences_ = 0;  ///< that it has room for
  bool graphs_ = true;
  GenerationSpeed speed_;
};

/// An exec on the CPU with `threads` threads and the best instruction set.
ops::Exec cpu_exec(int threads);

}  // namespace nrl::train
