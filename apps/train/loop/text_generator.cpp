#include "apps/train/loop/text_generator.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/base/text.h"
#include "core/device/cpu/features.h"
#include "core/ops/cpu_choice.h"
#include "core/ops/kernel_table.h"

namespace nrl::train {

int32_t sample_token(std::span<const float> logits, const SamplingOptions& options, float uniform,
                     std::vector<int32_t>& order) {
  const auto n = static_cast<int64_t>(logits.size());
  if (options.temperature == 0)
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  order.resize(logits.size());
  std::iota(order.begin(), order.end(), 0);
  auto likelier = [&](int32_t a, int32_t b) {
    const float x = logits[a], y = logits[b];
    return x != y ? x > y : a < b;
  };
  const int64_t keep = options.top_k > 0 ? std::min(options.top_k, n) : n;
  if (keep < n) std::nth_element(order.begin(), order.begin() + keep - 1, order.end(), likelier);
  order.resize(static_cast<size_t>(keep));
  if (options.top_p < 1) std::sort(order.begin(), order.end(), likelier);
  const float top = logits[*std::min_element(order.begin(), order.end(), likelier)];
  auto weight = [&](int32_t id) {
    return std::exp((static_cast<double>(logits[id] - top)) / options.temperature);
  };
  double total = 0;
  for (int32_t id : order) total += weight(id);
  if (options.top_p < 1) {
    double sum = 0;
    size_t count = 0;
    while (count < order.size() && (count == 0 || sum < options.top_p * total)) sum += weight(order[count++]);
    order.resize(count);
    total = sum;
  }
  double left = static_cast<double>(uniform) * total;
  for (int32_t id : order)
    if ((left -= weight(id)) < 0) return id;
  return order.back();
}

TextStream::TextStream(const data::Tokenizer& tokenizer, std::vector<int32_t> prompt)
    : tokenizer_(tokenizer), ids_(std::move(prompt)), shown_(tokenizer.decode(ids_).size()) {}

std::string TextStream::append(int32_t id) {
  ids_.push_back(id);
  // Decodes everything: a character may span several tokens, and spaces may depend on neighboring tokens.
  const std::string text = tokenizer_.decode(ids_);
  const size_t complete = complete_utf8(text);
  if (complete <= shown_) return {};
  std::string piece = text.substr(shown_, complete - shown_);
  shown_ = complete;
  return piece;
}

ops::Exec cpu_exec(int threads) {
  ops::Exec exec;
  exec.kernels = &ops::cpu_kernels(ops::cpu_choice().isa);
  exec.threads = threads;
  return exec;
}

TextGenerator::TextGenerator(const model::ModelSpec& spec, const model::ParameterList& parameters,
                             const std::vector<Tensor>& weights, const data::Tokenizer& tokenizer,
                             std::string_view prompt, int64_t max_tokens, const ops::Exec& exec)
    : tokenizer_(tokenizer), prompt_(tokenizer.encode(prompt)), max_tokens_(max_tokens) {
  if (prompt_.empty() && tokenizer.bos()) prompt_.push_back(*tokenizer.bos());
  if (prompt_.empty() && tokenizer.eos()) prompt_.push_back(*tokenizer.eos());
  if (prompt_.empty())
    fail(Exit::usage,
         "the prompt has no tokens, and the tokenizer has no beginning-of-text token. Fix: give a longer "
         "prompt");
  for (int32_t id : prompt_)
    if (id >= spec.vocab_size)
      fail(Exit::data,
           "the tokenizer gives id {}, but the model's vocabulary has {} tokens. Fix: use the model's "
           "tokenizer",
           id, spec.vocab_size);
  const auto requested = static_cast<int64_t>(prompt_.size()) + max_tokens;
  const int64_t length = spec.learned_positions ? std::min(requested, spec.max_positions) : requested;
  if (static_cast<int64_t>(prompt_.size()) >= length)
    fail(Exit::usage, "the prompt is too long: {} tokens, but the model has {} positions. Fix: shorten it",
         prompt_.size(), spec.max_positions);
  std::vector<model::ParameterView> views;
  for (const Tensor& weight : weights) views.push_back({weight, {}});
  inference_ = std::make_unique<model::Inference>(spec, parameters, std::move(views), exec, length);
}

void TextGenerator::run(const SamplingOptions& options, const std::function<void(std::string_view)>& print) {
  const PhiloxStream random(options.seed, "generate");
  TextStream text(tokenizer_, prompt_);
  std::vector<int32_t> order;
  inference_->reset();
  std::span<const float> logits = inference_->append(prompt_);
  for (int64_t made = 0;; ++made) {
    // Ids beyond the tokenizer's vocabulary (padding of the model's) are never sampled.
    const auto usable = std::min<size_t>(logits.size(), static_cast<size_t>(tokenizer_.vocab_size()));
    const int32_t next =
        sample_token(logits.first(usable), options, random.uniform(static_cast<uint64_t>(made)), order);
    if (tokenizer_.eos() == next) return;
    if (const std::string piece = text.append(next); !piece.empty()) print(piece);
    if (made + 1 == max_tokens_ || inference_->length() == inference_->max_tokens()) return;
    logits = inference_->append(std::span(&next, 1));
  }
}

}  // namespace nrl::train
