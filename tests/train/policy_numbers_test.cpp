// The numbers of rollouts that losses of policies read: weights of importance, divergence in rewards,
// REINFORCE++.
#include "apps/train/loop/policy_numbers.h"

#include <bit>
#include <cmath>
#include <map>

#include "apps/data/examples/rollout_set.h"
#include "apps/plan/loss.h"
#include "tests/catch.h"

using namespace nrl;

namespace {

/// Two prompts of two tokens with three and two completions; the last one of the first cannot be judged.
std::shared_ptr<const data::RolloutSet> rollouts() {
  std::vector<data::Rollout> all;
  const auto add = [&](int64_t group, double reward, std::vector<float> log_probs) {
    data::Rollout r{
        .ids = {1, 2}, .prompt_tokens = 2, .log_probs = log_probs, .reward = reward, .group = group};
    for (size_t t = 0; t < log_probs.size(); ++t) r.ids.push_back(static_cast<int32_t>(3 + t));
    r.trained = std::isfinite(reward);
    all.push_back(std::move(r));
  };
  add(0, 1, {-1, -2});
  add(0, 0.25, {-0.5});
  add(0, NAN, {-3});
  add(1, 2, {-1.5, -0.25, -1});
  add(1, 0, {-2, -1});
  return std::make_shared<data::RolloutSet>(std::move(all));
}

/// The log-probabilities of the sampler plus `d` + 0.125 * the number of the token.
std::shared_ptr<const data::SequenceNumbers> shifted(const data::RolloutSet& set, double d, double slope) {
  auto out = std::make_shared<data::SequenceNumbers>(set, data::SequenceNumbers::Kind::by_row);
  for (int64_t e = 0; e < set.size(); ++e) {
    const data::Rollout& r = set.rollouts()[static_cast<size_t>(e)];
    for (size_t t = 0; t < r.log_probs.size(); ++t)
      out->of(e, 0)[static_cast<size_t>(r.prompt_tokens) - 1 + t] =
          static_cast<double>(r.log_probs[t]) + d + slope * static_cast<double>(t);
  }
  return out;
}

using Columns = std::vector<std::vector<double>>;  // of each completion, its tokens

struct Step {
  Columns advantages, weights;
  std::map<std::string, double> metrics;
};

Step step_of(const Config& config, double old = 0, double slope = 0, double reference = 0) {
  const auto set = rollouts();
  const auto numbers =
      train::policy_numbers(config, set, shifted(*set, reference, 0), shifted(*set, old, slope));
  const std::vector<int64_t> examples{0, 1, 2, 3, 4};
  numbers->begin_step(examples, {.examples = 5, .loss_tokens = 8});
  Step out;
  for (const int64_t e : examples) {
    data::HostMicroBatch batch;
    batch.columns.resize(plan::PolicyColumn::count);
    const int64_t rows = set->length(e, 0).tokens - 1;
    for (int64_t t = 0; t < rows; ++t) batch.targets.push_back(set->in_loss(e, 0, t + 1) ? 9 : -1);
    numbers->append(e, 0, rows, batch);
    const auto of = [&](plan::PolicyColumn::Index column) {
      std::vector<double> values;
      for (int64_t t = 0; t < rows; ++t)
        if (batch.targets[static_cast<size_t>(t)] >= 0)
          values.push_back(
              static_cast<double>(std::bit_cast<float>(batch.columns[column][static_cast<size_t>(t)])));
      return values;
    };
    out.advantages.push_back(of(plan::PolicyColumn::advantage));
    out.weights.push_back(of(plan::PolicyColumn::importance));
  }
  for (const auto& [name, value] : numbers->metrics()) out.metrics[name] = value;
  return out;
}

void check_equal(const Columns& got, const Columns& want) {
  REQUIRE(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    REQUIRE(got[i].size() == want[i].size());
    for (size_t t = 0; t < got[i].size(); ++t)
      CHECK(got[i][t] == Approx(want[i][t]).epsilon(1e-6).margin(1e-7));
  }
}

}  // namespace

TEST_CASE("weights of importance are bounded by token or by sequence", "[grpo]") {
  // d is -0.25, 0, 0.25 in the tokens of every completion.
  const auto weights = [](ImportanceSampling type, std::optional<double> low, std::optional<double> high) {
    Config config;
    config.loss_fn.use_importance_sampling_correction = true;
    config.loss_fn.truncated_importance_sampling_type = type;
    config.loss_fn.truncated_importance_sampling_ratio_min = low;
    config.loss_fn.truncated_importance_sampling_ratio = high;
    return step_of(config, -0.25, 0.25);
  };
  const double a = std::exp(-0.25), b = std::exp(0.25);
  using enum ImportanceSampling;
  check_equal(weights(tis, {}, {}).weights, {{a, 1}, {a}, {}, {a, 1, b}, {a, 1}});
  const Step clamped = weights(tis, 0.9, 1.1);
  check_equal(clamped.weights, {{0.9, 1}, {0.9}, {}, {0.9, 1, 1.1}, {0.9, 1}});
  CHECK(clamped.metrics.at("is_oob_ratio") == Approx(5.0 / 8));
  CHECK(clamped.metrics.at("sampling_importance_ratio") == Approx((4 * 0.9 + 3 + 1.1) / 8));
  CHECK(clamped.metrics.at("token_mult_prob_error") == Approx((5 * b + 3) / 8));
  check_equal(weights(icepop, 0.9, 1.1).weights, {{0, 1}, {0}, {}, {0, 1, 0}, {0, 1}});
  // Means are -0.125, -0.25, 0 and -0.125; sums -0.25, -0.25, 0 and -0.25.
  check_equal(weights(seq_mask_tis, 0.85, {}).weights, {{a, 1}, {0}, {}, {a, 1, b}, {a, 1}});
  check_equal(weights(seq_tis, 0.9, {}).weights, {{0.9, 0.9}, {0.9}, {}, {1, 1, 1}, {0.9, 0.9}});
  check_equal(weights(seq_icepop, 0.9, 1.1).weights, {{0, 0}, {0}, {}, {1, 1, 1}, {0, 0}});
  // Without the correction nothing is weighted, and the mean ratio is reported.
  const Step plain = step_of(Config{}, -0.25, 0.25);
  check_equal(plain.weights, {{1, 1}, {1}, {}, {1, 1, 1}, {1, 1}});
  CHECK(plain.metrics.at("sampling_importance_ratio") == Approx((4 * a + 3 + b) / 8));
  CHECK(!plain.metrics.contains("is_oob_ratio"));
}

TEST_CASE("the divergence from the reference lowers rewards before groups are compared", "[grpo]") {
  Config config;
  config.loss_fn.reference_policy_kl_penalty = 0.5;
  config.loss_fn.reference_policy_kl_type = KlEstimator::k1;
  config.loss_fn.use_kl_in_reward = true;
  config.rollout.advantage_std = AdvantageStd::none;
  // The policy before the update is more probable by 0.2 at every token: k1 is 0.2.
  const Columns got = step_of(config, 0.3, 0, 0.1).advantages;
  const double first = (1 - 0.2) - (0.25 - 0.1), second = (2 - 0.3) - (0 - 0.2);
  check_equal(got, {{first, first}, {-first}, {}, {second, second, second}, {-second, -second}});
  config.loss_fn.use_kl_in_reward = false;
  check_equal(step_of(config, 0.3, 0, 0.1).advantages, {{0.75, 0.75}, {-0.75}, {}, {2, 2, 2}, {-2, -2}});
}

TEST_CASE("REINFORCE++ normalizes over all tokens", "[grpo]") {
  Config config;
  config.rollout.adv_estimator = AdvantageEstimator::reinforce_plus_plus;
  config.loss_fn.reference_policy_kl_penalty = 0.5;
  config.loss_fn.reference_policy_kl_type = KlEstimator::k2;
  const auto normalized = [](std::vector<double> x) {
    double mean = 0, variance = 0;
    for (const double v : x) mean += v / static_cast<double>(x.size());
    for (const double v : x) variance += (v - mean) * (v - mean) / static_cast<double>(x.size());
    for (double& v : x) v = (v - mean) / std::sqrt(variance);
    return Columns{{x[0], x[1]}, {x[2]}, {}, {x[3], x[4], x[5]}, {x[6], x[7]}};
  };
  // 0.375 beside the mean of the first group, 1 of the second.
  const std::vector<double> beside{0.375, 0.375, -0.375, 1, 1, 1, -1, -1};
  check_equal(step_of(config, 0.4, 0.25).advantages, normalized(beside));
  config.rollout.minus_baseline = false;
  check_equal(step_of(config, 0.4, 0.25).advantages, normalized({1, 1, 0.25, 2, 2, 2, 0, 0}));
  // The difference to the reference is 0.4, 0.65, 0.9 in the tokens of a completion.
  config.rollout.minus_baseline = true;
  config.loss_fn.use_kl_in_reward = true;
  const double k[] = {0.25 * 0.4 * 0.4, 0.25 * 0.65 * 0.65, 0.25 * 0.9 * 0.9};
  std::vector<double> lowered = beside;
  for (const auto& [i, token] : {std::pair(0, 0), {1, 1}, {2, 0}, {3, 0}, {4, 1}, {5, 2}, {6, 0}, {7, 1}})
    lowered[static_cast<size_t>(i)] -= k[token];
  check_equal(step_of(config, 0.4, 0.25).advantages, normalized(lowered));
}

TEST_CASE("raw advantages are rewards minus the divergence of each token", "[grpo]") {
  Config config;
  config.rollout.adv_estimator = AdvantageEstimator::raw;
  config.loss_fn.reference_policy_kl_penalty = 2;
  config.loss_fn.reference_policy_kl_type = KlEstimator::k1;
  config.loss_fn.use_kl_in_reward = true;
  // log q - log p is -0.5, then -0.75, then -1.
  check_equal(step_of(config, 0.5, 0.25).advantages, {{0, -0.5}, {-0.75}, {}, {1, 0.5, 0}, {-1, -1.5}});
}

TEST_CASE("the log-probabilities before the update are computed where a loss reads them", "[grpo]") {
  const auto reads = [](auto change) {
    Config config;
    change(config.loss_fn);
    return train::reads_old_log_probs(config);
  };
  CHECK(reads([](PolicyLossConfig&) {}));
  CHECK(!reads([](PolicyLossConfig& c) { c.force_on_policy_ratio = true; }));
  CHECK(!reads([](PolicyLossConfig& c) { c.type = PolicyObjective::reinforce; }));
  CHECK(reads([](PolicyLossConfig& c) {
    c.type = PolicyObjective::reinforce;
    c.use_importance_sampling_correction = true;
  }));
  CHECK(reads([](PolicyLossConfig& c) {
    c.force_on_policy_ratio = true;
    c.use_kl_in_reward = true;
  }));
}
