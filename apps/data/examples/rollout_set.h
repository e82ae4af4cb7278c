#pragma once
// Completions that a policy has just generated, as training examples.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "apps/data/examples/examples.h"

namespace nrl::data {

/// A completion of a prompt.
struct Rollout {
  std::vector<int32_t> ids;      ///< prompt and completion
  int64_t prompt_tokens = 0;     ///< at least 1
  std::vector<float> log_probs;  ///< of the completion's tokens, by the sampler
  double reward = 0;
  int64_t group = 0;       ///< number of the prompt: ascending from 0 without gaps, see Examples::group()
  bool trained = true;     ///< false: no token has a loss
  std::string where = {};  ///< of the prompt's record
};

/// A teacher's answers in place of the tokens with a loss of all examples, one after another: the `top_k`
/// most probable ids of each and their logits, or these less one number for each token, such as
/// log-probabilities.
struct TopNumbers {
  int64_t top_k = 0;
  std::vector<int32_t> ids;
  std::vector<float> numbers;
};

/// Immutable but for set_teacher().
class RolloutSet final : public Examples {
 public:
  explicit RolloutSet(std::vector<Rollout> rollouts);

  const std::vector<Rollout>& rollouts() const { return rollouts_; }
  /// Tokens with a loss.
  int64_t loss_tokens() const { return first_.back(); }
  /// Place of the first token with a loss of an example among the tokens of all examples.
  int64_t first_loss_token(int64_t example) const { return first_[static_cast<size_t>(example)]; }
  /// The numbers must be of all loss_tokens().
  void set_teacher(TopNumbers teacher);

  int64_t size() const override { return static_cast<int64_t>(rollouts_.size()); }
  int sequences_per_example() const override { return 1; }
  SequenceLength length(int64_t example, int sequence) const override;
  std::span<const int32_t> ids(int64_t example, int sequence) const override;
  bool in_loss(int64_t example, int sequence, int64_t token) const override;
  std::string where(int64_t example) const override;
  bool rendered() const override { return false; }
  std::string describe() const override;
  ExampleColumns columns() const override;
  double value(int64_t example, ExampleValue value) const override;
  std::span<const float> log_probs(int64_t example, TokenLogProbs kind) const override;
  int64_t group(int64_t example) const override;
  std::span<const int32_t> top_ids(int64_t example) const override;
  std::span<const float> top_log_probs(int64_t example) const override;

 private:
  const Rollout& at(int64_t example) const { return rollouts_[static_cast<size_t>(example)]; }

  std::vector<Rollout> rollouts_;
  template <class T>
  std::span<const T> of_teacher(const std::vector<T>& all, int64_t example) const;

  std::vector<std::vector<float>> sampler_;  ///< [tokens]: 0 in the prompt
  std::vector<int64_t> first_{0};            ///< first_loss_token(), and the end
  TopNumbers teacher_;
};

}  // namespace nrl::data
