#include "apps/verify/random_tokens.h"

#include <algorithm>
#include <cmath>

#include "apps/state/model_source.h"
#include "apps/train/start/document_rules.h"
#include "core/base/error.h"
#include "core/base/philox.h"

namespace nrl::verify {

void RandomTokens::read(int64_t i, std::span<int32_t> out) const {
  const PhiloxStream stream(seed_, "random tokens");
  const auto blocks = static_cast<uint64_t>(sequence_length_ + 1);
  for (size_t t = 0; t < out.size(); ++t) {
    const PhiloxBlock draw = stream.block(static_cast<uint64_t>(i) * blocks + t);
    const bool ends = documents().end_token >= 0 && draw[1] % 16 == 0;
    out[t] =
        ends ? documents().end_token : static_cast<int32_t>(draw[0] % static_cast<uint64_t>(vocab_size_));
  }
}

std::string RandomTokens::describe() const {
  return fmt::format("random tokens, seed {}", seed_);
}

RandomExamples::RandomExamples(int64_t size, int sequences_per_example, int64_t most, int64_t vocab_size,
                               uint64_t seed, int64_t top_k)
    : sequences_(sequences_per_example), top_k_(static_cast<int32_t>(top_k)) {
  const PhiloxStream stream(seed, "random examples");
  NRL_CHECK(most >= 2 && vocab_size > 0);
  uint64_t at = 0;
  const auto below = [&](int64_t end) {
    return static_cast<int64_t>(stream.bits(at++) % static_cast<uint64_t>(end));
  };
  for (int64_t i = 0; i < size * sequences_; ++i) {
    const int64_t longest = below(4) == 0 ? most : std::max<int64_t>(most / 4, 2);
    std::vector<int32_t>& ids = ids_.emplace_back(static_cast<size_t>(2 + below(longest - 1)));
    for (int32_t& id : ids) id = static_cast<int32_t>(below(vocab_size));
    // About as probable as tokens of a new model, so that ratios are on both sides of the clip.
    std::vector<float>& log_probs = log_probs_.emplace_back(ids.size());
    for (size_t t = 0; t < ids.size(); ++t)
      if (in_loss(i / sequences_, static_cast<int>(i % sequences_), static_cast<int64_t>(t)))
        log_probs[t] = static_cast<float>(-std::log(static_cast<double>(vocab_size)) +
                                          0.01 * static_cast<double>(below(101) - 50));
  }
  if (top_k == 0) return;
  NRL_CHECK(top_k <= vocab_size);
  for (int64_t i = 0; i < size; ++i) {
    Teacher& teacher = teachers_.emplace_back();
    for (int64_t t = 0; t < length(i, 0).loss_tokens; ++t) {
      const int64_t first = below(vocab_size), step = vocab_size / top_k;
      for (int64_t j = 0; j < top_k; ++j) {
        teacher.ids.push_back(static_cast<int32_t>((first + j * step) % vocab_size));
        teacher.log_probs.push_back(-0.01f * static_cast<float>(below(500)));
      }
    }
  }
}

bool RandomExamples::in_loss(int64_t example, int, int64_t token) const {
  return token == 1 || (token > 0 && (example * 31 + token * 17) % 5 < 3);
}

data::SequenceLength RandomExamples::length(int64_t example, int sequence) const {
  data::SequenceLength out{.tokens = static_cast<int32_t>(ids(example, sequence).size())};
  for (int64_t t = 1; t < out.tokens; ++t) out.loss_tokens += in_loss(example, sequence, t) ? 1 : 0;
  return out;
}

std::span<const int32_t> RandomExamples::ids(int64_t example, int sequence) const {
  return ids_[static_cast<size_t>(example * sequences_ + sequence)];
}

data::ExampleColumns RandomExamples::columns() const {
  data::ExampleColumns columns;
  if (sequences_ > 1) return columns;
  columns.values[static_cast<size_t>(data::ExampleValue::advantage)] = true;
  columns.log_probs[static_cast<size_t>(data::TokenLogProbs::sampler)] = true;
  columns.top_k = top_k_;
  return columns;
}

double RandomExamples::value(int64_t example, data::ExampleValue value) const {
  // None is negative: relative errors of a loss around 0 would be large.
  return value == data::ExampleValue::advantage ? static_cast<double>(example * 7 % 5) + 0.5 : 0;
}

std::span<const float> RandomExamples::log_probs(int64_t example, data::TokenLogProbs kind) const {
  if (kind != data::TokenLogProbs::sampler) return {};
  return log_probs_[static_cast<size_t>(example)];
}

std::string RandomExamples::where(int64_t example) const {
  return fmt::format("random example {}", example);
}

std::string RandomExamples::describe() const {
  return fmt::format("{} examples of random tokens", size());
}

train::TrainData random_tokens(const ConfigResult& config, int64_t steps) {
  const Config& c = config.config;
  const int64_t vocabulary = train::load_model_spec(config).vocab_size,
                samples = steps * c.policy.train_global_batch_size,
                length = c.policy.max_total_sequence_length;
  const auto seed = static_cast<uint64_t>(resolved_loop(c).seed);
  train::TrainData out;
  out.samples = out.epoch_samples = samples;
  if (trains_on_examples(c)) {
    out.examples = std::make_shared<RandomExamples>(
        samples, static_cast<int>(example_tokens(c) / length), length, vocabulary, seed,
        c.algorithm == Algorithm::distill ? c.distillation.topk : 0);
    return out;
  }
  data::DocumentRules rules = train::document_rules(c);
  if (rules.any()) rules.end_token = static_cast<int32_t>(vocabulary - 1);
  out.dataset = std::make_unique<RandomTokens>(rules, samples, length, vocabulary, seed);
  return out;
}

}  // namespace nrl::verify
