#include "apps/data/examples/rollout_set.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::data {

RolloutSet::RolloutSet(std::vector<Rollout> rollouts) : rollouts_(std::move(rollouts)) {
  for (const Rollout& r : rollouts_) {
    NRL_CHECK(r.prompt_tokens >= 1 && std::ssize(r.ids) == r.prompt_tokens + std::ssize(r.log_probs));
    std::vector<float>& all = sampler_.emplace_back(static_cast<size_t>(r.prompt_tokens));
    all.insert(all.end(), r.log_probs.begin(), r.log_probs.end());
    first_.push_back(first_.back() + (r.trained ? std::ssize(r.log_probs) : 0));
  }
}

void RolloutSet::set_teacher(TopNumbers teacher) {
  NRL_CHECK(std::ssize(teacher.ids) == loss_tokens() * teacher.top_k &&
            teacher.numbers.size() == teacher.ids.size());
  teacher_ = std::move(teacher);
}

template <class T>
std::span<const T> RolloutSet::of_teacher(const std::vector<T>& all, int64_t example) const {
  const int64_t begin = first_loss_token(example), end = first_loss_token(example + 1);
  return std::span(all).subspan(static_cast<size_t>(begin * teacher_.top_k),
                                static_cast<size_t>((end - begin) * teacher_.top_k));
}

std::span<const int32_t> RolloutSet::top_ids(int64_t example) const {
  return of_teacher(teacher_.ids, example);
}

std::span<const float> RolloutSet::top_log_probs(int64_t example) const {
  return of_teacher(teacher_.numbers, example);
}

SequenceLength RolloutSet::length(int64_t example, int /*sequence*/) const {
  const Rollout& r = at(example);
  return {.tokens = static_cast<int32_t>(r.ids.size()),
          .loss_tokens = r.trained ? static_cast<int32_t>(r.log_probs.size()) : 0};
}

std::span<const int32_t> RolloutSet::ids(int64_t example, int /*sequence*/) const {
  return at(example).ids;
}

bool RolloutSet::in_loss(int64_t example, int /*sequence*/, int64_t token) const {
  return at(example).trained && token >= at(example).prompt_tokens;
}

std::string RolloutSet::where(int64_t example) const {
  return at(example).where;
}

std::string RolloutSet::describe() const {
  return fmt::format("{} completions", grouped(size()));
}

ExampleColumns RolloutSet::columns() const {
  ExampleColumns columns;
  columns.values[static_cast<size_t>(ExampleValue::reward)] = true;
  columns.log_probs[static_cast<size_t>(TokenLogProbs::sampler)] = true;
  columns.groups = true;
  columns.top_k = teacher_.top_k;
  return columns;
}

double RolloutSet::value(int64_t example, ExampleValue value) const {
  return value == ExampleValue::reward ? at(example).reward : 0;
}

std::span<const float> RolloutSet::log_probs(int64_t example, TokenLogProbs kind) const {
  if (kind != TokenLogProbs::sampler) return {};
  return sampler_[static_cast<size_t>(example)];
}

int64_t RolloutSet::group(int64_t example) const {
  return at(example).group;
}

}  // namespace nrl::data
