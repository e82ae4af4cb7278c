#include "apps/train/loop/rollouts.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "apps/monitor/timers.h"
#include "core/base/error.h"
#include "core/base/sample.h"
#include "core/base/text.h"

namespace nrl::train {
namespace {

/// Numbers of a completion before its ids and log-probabilities, as ranks exchange them.
enum Field : size_t { tokens_field, ended_field, judged_field, total_field, fields };

/// 1 - C(n - c, k) / C(n, k): the probability that one of k of n completions, c of which are right, is right.
double pass_at(int64_t k, int64_t n, int64_t c) {
  if (n - c < k) return 1;
  double none = 1;
  for (int64_t i = n - c + 1; i <= n; ++i) none *= 1 - static_cast<double>(k) / static_cast<double>(i);
  return 1 - none;
}

}  // namespace

Rollouts::Rollouts(const Config& config, const data::Prompts& prompts, const data::Tokenizer& tokenizer,
                   const RolloutRanks& ranks, Generate generate, RewardFunctions rewards)
    : config_(config),
      prompts_(prompts),
      tokenizer_(tokenizer),
      ranks_(ranks),
      generate_(std::move(generate)),
      rewards_(std::move(rewards)),
      order_(prompts.size(), config.data.shuffle, static_cast<uint64_t>(data_seed(config))) {}

bool Rollouts::Group::equal() const {
  std::optional<double> first;
  for (const Reward& r : rewards) {
    if (!r.total) continue;
    if (first && *first != *r.total) return false;
    first = r.total;
  }
  return true;
}

void Rollouts::answer(std::span<Group> groups, int64_t samples, int64_t first, double temperature,
                      Made& made) {
  const auto own = [&](size_t g) { return static_cast<int>(g) % ranks_.dp_size == ranks_.dp; };
  const double begin = monitor::Timers::steady_seconds();
  std::vector<GenerationRequest> requests;
  for (size_t g = 0; g < groups.size(); ++g)
    if (own(g))
      requests.push_back({.prompt = groups[g].prompt,
                          .first_sample = (first + static_cast<int64_t>(g)) * samples,
                          .count = samples});
  std::vector<Completion> completions = generate_(requests, temperature);
  NRL_CHECK(std::ssize(completions) == std::ssize(requests) * samples);
  const double generated = monitor::Timers::steady_seconds();
  std::vector<Reward> rewards;
  if (ranks_.judges) {
    std::vector<RewardRequest> judged;
    for (size_t i = 0; i < completions.size(); ++i)
      judged.push_back({.prompt = requests[i / static_cast<size_t>(samples)].prompt,
                        .text = tokenizer_.decode(completions[i].ids),
                        .tokens = std::ssize(completions[i].ids),
                        .ended = completions[i].ended});
    rewards = rewards_.judge(judged);
    NRL_CHECK(rewards.size() == completions.size());
  }

  // Every rank needs all of them: a sum of numbers that are 0 but on the rank that judges.
  std::vector<double> longest{0};
  for (const Completion& c : completions)
    longest[0] = std::max(longest[0], static_cast<double>(c.ids.size()));
  ranks_.all->all_reduce(std::span(longest), comm::Reduce::max);
  const auto most = static_cast<size_t>(longest[0]);
  const size_t parts = rewards_.names.size(), stride = fields + 2 * parts + 2 * most;
  std::vector<double> all(groups.size() * static_cast<size_t>(samples) * stride);
  if (ranks_.judges)
    for (size_t g = 0, i = 0; g < groups.size(); ++g)
      for (int64_t s = 0; own(g) && s < samples; ++s, ++i) {
        double* const to = &all[(g * static_cast<size_t>(samples) + static_cast<size_t>(s)) * stride];
        const Completion& c = completions[i];
        to[tokens_field] = static_cast<double>(c.ids.size());
        to[ended_field] = c.ended ? 1 : 0;
        to[judged_field] = rewards[i].total ? 1 : 0;
        to[total_field] = rewards[i].total.value_or(0);
        for (size_t p = 0; p < parts; ++p) {
          const double part = rewards[i].parts[p];
          to[fields + p] = std::isnan(part) ? 0 : part;
          to[fields + parts + p] = std::isnan(part) ? 0 : 1;
        }
        double* const tokens = to + fields + 2 * parts;
        for (size_t t = 0; t < c.ids.size(); ++t) {
          tokens[t] = c.ids[t];
          tokens[most + t] = static_cast<double>(c.log_probs[t]);
        }
      }
  ranks_.all->all_reduce(std::span(all));
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].completions.clear();
    groups[g].rewards.clear();
    for (int64_t s = 0; s < samples; ++s) {
      const double* const from = &all[(g * static_cast<size_t>(samples) + static_cast<size_t>(s)) * stride];
      Completion& c = groups[g].completions.emplace_back();
      c.ended = from[ended_field] > 0;
      const double* const tokens = from + fields + 2 * parts;
      for (size_t t = 0; t < static_cast<size_t>(from[tokens_field]); ++t) {
        c.ids.push_back(static_cast<int32_t>(tokens[t]));
        c.log_probs.push_back(static_cast<float>(tokens[most + t]));
      }
      Reward& r = groups[g].rewards.emplace_back();
      if (from[judged_field] > 0) r.total = from[total_field];
      for (size_t p = 0; p < parts; ++p)
        r.parts.push_back(from[fields + parts + p] > 0 ? from[fields + p] : NAN);
    }
  }
  const double end = monitor::Timers::steady_seconds();
  made.generation_s += generated - begin;
  made.reward_s += end - generated;
}

Rollouts::Made Rollouts::make(int64_t& cursor) {
  const RolloutConfig& c = config_.rollout;
  Made made;
  std::vector<Group> kept, equal;
  const int64_t rounds = c.use_dynamic_sampling ? c.dynamic_sampling_max_gen_batches : 1;
  for (int64_t round = 0; round < rounds && std::ssize(kept) < c.num_prompts_per_step; ++round) {
    std::vector<Group> groups(static_cast<size_t>(c.num_prompts_per_step));
    for (size_t g = 0; g < groups.size(); ++g)
      groups[g].prompt = &prompts_[order_.at(cursor + static_cast<int64_t>(g))];
    answer(groups, c.num_generations_per_prompt, cursor, c.temperature, made);
    cursor += c.num_prompts_per_step;
    for (Group& g : groups) (c.use_dynamic_sampling && g.equal() ? equal : kept).push_back(std::move(g));
  }
  // Too few groups that train something: others fill the batch, in the order of their prompts.
  const double dropped = static_cast<double>(equal.size());
  for (Group& g : equal) kept.push_back(std::move(g));
  kept.resize(static_cast<size_t>(c.num_prompts_per_step));

  made.set = set_of(kept);
  add_metrics(kept, made, "");
  if (c.use_dynamic_sampling) made.metrics.push_back({.name = "dropped_groups", .value = dropped});
  for (size_t s = 0; s < kept.front().completions.size(); ++s)
    made.samples.push_back(sample(kept.front(), s));
  return made;
}

std::shared_ptr<data::RolloutSet> Rollouts::set_of(std::span<const Group> groups) const {
  std::vector<data::Rollout> rollouts;
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t s = 0; s < groups[g].completions.size(); ++s) {
      const Completion& completion = groups[g].completions[s];
      const std::optional<double>& total = groups[g].rewards[s].total;
      data::Rollout& r = rollouts.emplace_back();
      r.ids = groups[g].prompt->ids;
      r.prompt_tokens = std::ssize(r.ids);
      r.ids.insert(r.ids.end(), completion.ids.begin(), completion.ids.end());
      r.log_probs = completion.log_probs;
      r.reward = total.value_or(NAN);
      r.group = static_cast<int64_t>(g);
      r.trained = total && (completion.ended || !config_.rollout.overlong_filtering);
      r.where = groups[g].prompt->where;
    }
  return std::make_shared<data::RolloutSet>(std::move(rollouts));
}

Rollouts::Made Rollouts::validate(const data::Prompts& prompts) {
  const RolloutConfig& c = config_.rollout;
  Made made;
  std::vector<Group> groups(
      static_cast<size_t>(std::min(c.max_val_samples.value_or(prompts.size()), prompts.size())));
  for (size_t g = 0; g < groups.size(); ++g) groups[g].prompt = &prompts[static_cast<int64_t>(g)];
  const int64_t n = c.val_num_generations_per_prompt;
  answer(groups, n, 0, c.val_temperature, made);
  made.set = set_of(groups);
  add_metrics(groups, made, "val_");
  for (const int64_t k : {int64_t{1}, n}) {
    if (rewards_.names.empty()) break;
    double sum = 0;
    for (const Group& g : groups)
      sum += pass_at(k, n, std::ranges::count_if(g.rewards, [](const Reward& r) { return r.total >= 1.0; }));
    made.metrics.push_back({.name = fmt::format("val_pass_at_{}", k),
                            .value = sum / static_cast<double>(groups.size()),
                            .brief = fmt::format("pass@{}", k)});
    if (n == 1) break;
  }
  for (const Group& g : groups)
    for (size_t s = 0; s < g.completions.size(); ++s) made.samples.push_back(sample(g, s));
  return made;
}

void Rollouts::add_metrics(std::span<const Group> groups, Made& made, const std::string& prefix) const {
  std::vector<double> totals, deviations, lengths;
  std::vector<std::vector<double>> parts(rewards_.names.size());
  double equal = 0, cut = 0, unscored = 0;
  for (const Group& g : groups) {
    std::vector<double> of_group;
    for (size_t s = 0; s < g.completions.size(); ++s) {
      if (const auto& total = g.rewards[s].total)
        of_group.push_back(*total);
      else
        ++unscored;
      for (size_t p = 0; p < parts.size(); ++p)
        if (!std::isnan(g.rewards[s].parts[p])) parts[p].push_back(g.rewards[s].parts[p]);
      lengths.push_back(static_cast<double>(g.completions[s].ids.size()));
      cut += g.completions[s].ended ? 0 : 1;
    }
    deviations.push_back(deviation(of_group));
    equal += g.equal() ? 1 : 0;
    totals.insert(totals.end(), of_group.begin(), of_group.end());
  }
  const auto add = [&](const std::string& name, double value, std::string brief = {}) {
    made.metrics.push_back({.name = prefix + name, .value = value, .brief = std::move(brief)});
  };
  const auto count = static_cast<double>(lengths.size());
  if (!parts.empty()) add("reward", mean(totals), "reward");
  if (parts.size() > 1)
    for (size_t p = 0; p < parts.size(); ++p) add("reward_" + rewards_.names[p], mean(parts[p]));
  add("completion_tokens", mean(lengths), "tokens");
  add("truncation_rate", cut / count);
  if (parts.empty()) return;
  add("unscored_rate", unscored / count);
  if (!prefix.empty()) return;
  made.equal_groups = static_cast<int64_t>(equal);
  made.scored = std::ssize(totals);
  add("reward_std", mean(deviations));
  add("frac_reward_zero_std", equal / static_cast<double>(groups.size()));
}

JsonValue Rollouts::sample(const Group& group, size_t i) const {
  const Reward& reward = group.rewards[i];
  JsonValue out = JsonValue::object({{"record", group.prompt->where},
                                     {"prompt", printable(tokenizer_.decode(group.prompt->ids))},
                                     {"completion", printable(tokenizer_.decode(group.completions[i].ids))},
                                     {"ended", group.completions[i].ended}});
  if (!rewards_.names.empty()) out.set("reward", reward.total ? JsonValue(*reward.total) : JsonValue());
  for (size_t p = 0; p < rewards_.names.size(); ++p)
    if (!std::isnan(reward.parts[p])) out.set("reward_" + rewards_.names[p], reward.parts[p]);
  return out;
}

}  // namespace nrl::train
