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

/// Immutable.
class RolloutSet final : public Examples {
 public:
  explicit RolloutSet(std::vector<Rollout> rollouts);

  const std::vector<Rollout>& rollouts() const { return rollouts_; }

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

 private:
  const Rollout& at(int64_t example) const { return rollouts_[static_cast<size_t>(example)]; }

  std::vector<Rollout> rollouts_;
  std::vector<std::vector<float>> sampler_;  ///< [tokens]: 0 in the prompt
};

}  // namespace nrl::data
