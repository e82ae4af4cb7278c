#include "apps/train/loop/text_generator.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/base/text.h"
#include "core/device/cpu/features.h"
#include "core/ops/cpu_choice.h"
#include "core/ops/kernel_table.h"
#include "core/trace/trace.h"

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

std::string TextEnd::append(std::string_view piece) {
  held_ += piece;
  if (end_.empty()) return rest();
  if (const size_t at = held_.find(end_); at != std::string::npos) {
    reached_ = true;
    return std::exchange(held_, {}).substr(0, at);
  }
  size_t keep = std::min(held_.size(), end_.size() - 1);
  while (!held_.ends_with(std::string_view(end_).substr(0, keep))) --keep;
  std::string shown = held_.substr(0, held_.size() - keep);
  held_.erase(0, shown.size());
  return shown;
}

TextGenerator::TextGenerator(const model::ModelSpec& spec, const model::ParameterList& parameters,
                             const std::vector<Tensor>& weights, const data::Tokenizer& tokenizer,
                             data::Prompt prompt, int64_t max_tokens, const ops::Exec& exec)
    : spec_(spec),
      parameters_(parameters),
      weights_(weights),
      tokenizer_(tokenizer),
      max_tokens_(max_tokens),
      exec_(exec) {
  set_prompt(std::move(prompt));
}

void TextGenerator::set_prompt(data::Prompt prompt) {
  NRL_CHECK(!prompt.ids.empty());
  for (int32_t id : prompt.ids)
    if (id >= spec_.vocab_size)
      fail(Exit::data,
           "the tokenizer gives id {}, but the model's vocabulary has {} tokens. Fix: use the model's "
           "tokenizer",
           id, spec_.vocab_size);
  const auto size = static_cast<int64_t>(prompt.ids.size());
  const auto limited = [&](int64_t tokens) {
    return spec_.learned_positions ? std::min(tokens, spec_.max_positions) : tokens;
  };
  const int64_t length = limited(size + max_tokens_);
  if (size >= length)
    fail(Exit::usage, "the prompt is too long: {} tokens, but the model has {} positions. Fix: shorten it",
         size, spec_.max_positions);
  prompt_ = std::move(prompt);
  const int64_t held = inference_ ? inference_->max_tokens() : 0;
  if (length <= held) return;
  inference_.reset();  // before the memory of a larger one is allocated
  std::vector<model::ParameterView> views;
  for (const Tensor& weight : weights_) views.push_back({weight, {}});
  inference_ = std::make_unique<model::Inference>(spec_, parameters_, std::move(views), exec_,
                                                  std::max(length, limited(2 * held)));
}

bool TextGenerator::run(const SamplingOptions& options, const std::function<void(std::string_view)>& print) {
  const PhiloxStream random(options.seed, "generate");
  TextStream text(tokenizer_, prompt_.ids);
  TextEnd end(prompt_.end_text);
  const auto show = [&](const std::string& piece) {
    if (!piece.empty()) print(piece);
  };
  std::vector<int32_t> order;
  inference_->reset();
  std::span<const float> logits = inference_->append(prompt_.ids);
  for (int64_t made = 0;; ++made) {
    // Ids beyond the tokenizer's vocabulary (padding of the model's) are never sampled.
    const auto usable = std::min<size_t>(logits.size(), static_cast<size_t>(tokenizer_.vocab_size()));
    const int32_t next = [&] {
      const trace::Range range("sample_token");
      return sample_token(logits.first(usable), options, random.uniform(static_cast<uint64_t>(made)), order);
    }();
    const bool ends =
        std::find(prompt_.end_ids.begin(), prompt_.end_ids.end(), next) != prompt_.end_ids.end();
    if (!ends) show(end.append(text.append(next)));
    const bool full = made + 1 == max_tokens_ || inference_->length() == inference_->max_tokens();
    if (ends || end.reached() || full) {
      show(end.rest());
      return ends || end.reached();
    }
    logits = inference_->append(std::span(&next, 1));
  }
}

}  // namespace nrl::train
