#pragma once
// Generation of many sequences at once from a model in training.
//
//   LocalGenerator generator(spec, parameters, views, exec, limits);
//   generator.submit(requests, options);
//   while (const std::optional<Completion> c = generator.next()) use(*c);

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/model/generation_pass.h"
#include "apps/rollout/scheduler.h"

namespace nrl::rollout {

struct SamplingOptions {
  int64_t max_new_tokens = 0;
  double temperature = 1;              ///< 0: greedy
  int64_t top_k = 0;                   ///< sample from the K most likely tokens; 0: from all
  double top_p = 1;                    ///< sample from the most likely tokens with this total probability
  std::vector<int32_t> stop_ids = {};  ///< end a sequence; the token belongs to it
  uint64_t seed = 0;
  /// Called with each token as soon as it is sampled; true ends the sequence as a stop token does. May be
  /// empty.
  std::function<bool(int64_t id, int32_t token)> on_token = {};
  /// The likeliest tokens are found on the host. Not with tensor parallelism.
  bool restricted() const { return temperature > 0 && (top_k > 0 || top_p < 1); }
};

/// A sequence to generate. Requests of one submit() that follow each other with the same prompt object share
/// its computation.
struct Request {
  /// Distinct among the requests in progress. With the seed it determines the random numbers, and so the
  /// text.
  int64_t id = 0;
  std::shared_ptr<const std::vector<int32_t>> prompt;  ///< at least one token
  /// Given: the seed of its random numbers, which then do not depend on the id, as if it were 0.
  std::optional<uint64_t> seed = {};
};

enum class Finish : uint8_t { stop, length };

struct Completion {
  int64_t id = 0;
  std::vector<int32_t> ids;  ///< without the prompt
  /// Holds the log-probability of each id in softmax(logits / temperature), of the tokens that may be sampled
  /// where top_k or top_p leaves some out; in softmax(logits) where greedy.
  std::vector<float> log_probs;
  Finish finish = Finish::stop;
  int64_t weight_version = 0;
};

/// The interface of rollouts: the engine of this process, or a server.
class Generator {
 public:
  virtual ~Generator() = default;
  /// Throws Error (Exit::usage) if a prompt with its new tokens is too long, or Exit::data if a token is not
  /// of the model's vocabulary; then none of the requests is taken.
  virtual void submit(std::span<const Request> requests, const SamplingOptions& options) = 0;
  /// The next completion, in any order; empty: there are no more. Fails with Exit::diverged where logits are
  /// not finite.
  virtual std::optional<Completion> next() = 0;
  /// The weights have changed; no sequence may be in progress.
  virtual void weights_changed(int64_t version) = 0;
};

/// The passes that have been executed. Decoding passes have only rows of the newest tokens of sequences.
struct GeneratorCounts {
  int64_t passes = 0, prompt_tokens = 0, sampled_tokens = 0, preemptions = 0;
  int64_t decoded_tokens = 0;                      ///< sampled by decoding passes
  int64_t replays = 0;                             ///< passes that a CUDA graph executed
  double prefill_seconds = 0, decode_seconds = 0;  ///< of the passes with rows of prompts, and of the others
};

/// Continuous batching over model::GenerationPass. With tensor parallelism every rank makes the same calls.
class LocalGenerator final : public Generator {
 public:
  /// Arguments as for model::GenerationPass. `limits.longest` tokens must fit into its pages. On the host
  /// `threads` threads leave out tokens for top_k and top_p; 0: as many as exec has, which is one of a GPU's.
  LocalGenerator(const model::ModelSpec& spec, const model::ParameterList& parameters,
                 std::vector<model::ParameterView> views, const ops::Exec& exec,
                 const model::GenerationLimits& limits, const model::ModelLayout& layout = {},
                 const parallel::Groups* groups = nullptr, int threads = 0);

  void submit(std::span<const Request> requests, const SamplingOptions& options) override;
  std::optional<Completion> next() override;
  void weights_changed(int64_t version) override;

  const Pages& pages() const { return scheduler_.pages(); }
  GeneratorCounts counts() const;
  model::GenerationMemory memory() const { return pass_.memory(); }
  /// As GenerationPass::no_graphs().
  const std::string& no_graphs() const { return pass_.no_graphs(); }
  int threads() const { return threads_; }

 private:
  struct Sequence {
    std::vector<int32_t> tokens;  ///< with the prompt
    int64_t prompt = 0;           ///< tokens of the prompt
    Completion completion = {};
    std::shared_ptr<const SamplingOptions> options = {};
    uint64_t seed = 0;
    int64_t sample = 0;
  };
  void run(const Pass& pass);
  void restrict(std::span<const int64_t> sequences);
  void append(int64_t sequence, const model::SampledToken& sampled);

  model::GenerationPass pass_;
  Scheduler scheduler_;
  int threads_;
  int64_t vocabulary_, version_ = 0;
  std::map<int64_t, Sequence> sequences_;
  std::deque<Completion> done_;
  GeneratorCounts counts_;
};

}  // namespace nrl::rollout
