#pragma once
// Numbers of examples beside their tokens: margins, rewards, log-probabilities.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace nrl::data {

/// Numbers of a whole example.
enum class ExampleValue : uint8_t {
  margin,     ///< of a preference: how much better the chosen sequence is
  reward,     ///< of a rollout
  advantage,  ///< of a rollout
};
inline constexpr size_t example_values = 3;

/// Policies whose log-probabilities of the tokens a rollout may have.
enum class TokenLogProbs : uint8_t {
  sampler,  ///< the policy that sampled the completion
  old,      ///< the policy before the update, computed again by the trainer
};
inline constexpr size_t token_log_probs = 2;

/// The kinds of numbers of a set: each of its examples has them, or none.
struct ExampleColumns {
  std::array<bool, example_values> values{};      ///< by ExampleValue
  std::array<bool, token_log_probs> log_probs{};  ///< by TokenLogProbs
  bool groups = false;                            ///< examples belong to groups (format rollouts)
  int32_t top_k = 0;                              ///< teacher's log-probabilities per token; 0: none

  bool has(ExampleValue value) const { return values[static_cast<size_t>(value)]; }
  bool has(TokenLogProbs kind) const { return log_probs[static_cast<size_t>(kind)]; }
  bool operator==(const ExampleColumns&) const = default;
};

/// The numbers of one example, as its ExampleColumns say. Arrays have an element (top_k elements) for each
/// token of the completion; all numbers are finite.
struct ExampleNumbers {
  std::array<double, example_values> values{};
  std::array<std::vector<float>, token_log_probs> log_probs;
  std::vector<int32_t> top_ids;  ///< distinct in each token
  std::vector<float> top_log_probs;
  std::string group;  ///< the JSON text of its name; empty: a group of its own
};

}  // namespace nrl::data
