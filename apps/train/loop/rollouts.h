#pragma once
// Rollouts of one version of the weights: which prompts are answered, by which ranks, what the completions
// are worth, and which of them are trained. Knows neither model nor rewards: both are given as functions.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/data/examples/epoch_order.h"
#include "apps/data/examples/prompts.h"
#include "apps/data/examples/rollout_set.h"
#include "apps/data/tokenizer.h"
#include "apps/monitor/facts.h"
#include "core/config/config.h"
#include "parallel/comm/communicator.h"

namespace nrl::train {

/// A prompt to be answered `count` times. Random numbers depend on the number of the completion, which is
/// first_sample + 0, 1, ..., on the seed and on the position alone.
struct GenerationRequest {
  const data::Prompts::Item* prompt = nullptr;
  int64_t first_sample = 0, count = 1;
};
struct Completion {
  std::vector<int32_t> ids;      ///< at least one; the end token included
  std::vector<float> log_probs;  ///< of the ids, in the distribution that they were drawn from
  bool ended = false;            ///< by an end token, not by the limit of tokens
};
/// The completions of requests in order, `count` of each; the same on all ranks of a model replica.
using Generate =
    std::function<std::vector<Completion>(std::span<const GenerationRequest>, double temperature)>;

/// A completion to be judged.
struct RewardRequest {
  const data::Prompts::Item* prompt = nullptr;
  std::string text;    ///< the completion, without its end token
  int64_t tokens = 0;  ///< with it
  bool ended = false;
};
struct Reward {
  std::optional<double> total;  ///< absent: it cannot be judged
  std::vector<double> parts;    ///< of RewardFunctions::names; NaN: not judged
};
struct RewardFunctions {
  std::vector<std::string> names;
  std::function<std::vector<Reward>(std::span<const RewardRequest>)> judge;
};

/// Data-parallel ranks divide the prompts; the first rank of a model replica judges.
struct RolloutRanks {
  int dp = 0, dp_size = 1;
  bool judges = true;
  comm::Communicator* all = nullptr;  ///< all ranks, in host memory; must outlive the rollouts
};

class Rollouts {
 public:
  /// All arguments must outlive this object.
  Rollouts(const Config& config, const data::Prompts& prompts, const data::Tokenizer& tokenizer,
           const RolloutRanks& ranks, Generate generate, RewardFunctions rewards);

  struct Made {
    std::shared_ptr<data::RolloutSet> set;  ///< the same on all ranks
    std::vector<monitor::Metric> metrics;
    /// For samples.jsonl: {"prompt", "completion", "ended", "reward"...} of the first group, of an evaluation
    /// of all.
    std::vector<JsonValue> samples;
    double generation_s = 0, reward_s = 0;
    int64_t equal_groups = 0;  ///< of the set: they train nothing
    int64_t scored = 0;        ///< completions of the set with a reward
  };
  /// Collective. rollouts_at_once() rollouts of the prompts from position `cursor` of the order on, which it
  /// moves behind those that were answered.
  Made make(int64_t& cursor);

  /// Collective. The metrics of an evaluation: mean reward, share of prompts with a completion whose reward
  /// is 1 (pass@k, without bias: Chen et al. 2021), tokens.
  Made validate(const data::Prompts& prompts);

 private:
  struct Group {
    const data::Prompts::Item* prompt = nullptr;
    std::vector<Completion> completions = {};
    std::vector<Reward> rewards = {};
    bool equal() const;  ///< all rewards are equal, or there is none
  };
  /// Collective. Answers the groups' prompts `samples` times and judges the answers. `first`: number of the
  /// first prompt, for random numbers.
  void answer(std::span<Group> groups, int64_t samples, int64_t first, double temperature, Made& made);
  std::shared_ptr<data::RolloutSet> set_of(std::span<const Group> groups) const;
  void add_metrics(std::span<const Group> groups, Made& made, const std::string& prefix) const;
  JsonValue sample(const Group& group, size_t i) const;

  const Config& config_;
  const data::Prompts& prompts_;
  const data::Tokenizer& tokenizer_;
  const RolloutRanks ranks_;
  const Generate generate_;
  const RewardFunctions rewards_;
  data::EpochOrder order_;
};

}  // namespace nrl::train
