#include "apps/train/text_generator.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/device/cpu/features.h"
#include "core/ops/kernel_table.h"

namespace nrl::train {
namespace {

// Bytes of `text` before a character whose last bytes are still to come.
size_t complete_bytes(std::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(4, text.size()); ++back) {
    const auto c = static_cast<unsigned char>(text[text.size() - back]);
    if ((c & 0xC0) == 0x80) continue;
    const size_t need = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : c >= 0xC0 ? 2 : 1;
    return need > back ? text.size() - back : text.size();
  }
  return text.size();
}

}  // namespace

int32_t sample_token(std::span<const float> logits, const SamplingOptions& options, float uniform,
                     std::vector<int32_t>& order) {
  const auto n = static_cast<int64_t>(logits.size());
  if (options.temperature == 0)
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  order.resize(logits.size());
  std::iota(order.begin(), order.end(), 0);
  auto likelier = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  const int64_t keep = options.top_k > 0 ? std::min(options.top_k, n) : n;
  if (keep < n) std::nth_element(order.begin(), order.begin() + keep - 1, order.end(), likelier);
  order.resize(static_cast<size_t>(keep));
  if (options.top_p < 1) std::sort(order.begin(), order.end(), likelier);
  const float top = logits[static_cast<size_t>(*std::min_element(order.begin(), order.end(), likelier))];
  auto weight = [&](int32_t id) {
    return std::exp((static_cast<double>(logits[static_cast<size_t>(id)] - top)) / options.temperature);
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

TextGenerator::TextGenerator(const model::ModelSpec& spec, const model::ParameterList& parameters,
                             const std::vector<Tensor>& weights, const data::Tokenizer& tokenizer,
                             std::string_view prompt, int64_t max_tokens, int threads)
    : tokenizer_(tokenizer), prompt_(tokenizer.encode(prompt)), max_tokens_(max_tokens) {
  if (prompt_.empty() && tokenizer.bos()) prompt_.push_back(*tokenizer.bos());
  if (prompt_.empty() && tokenizer.eos()) prompt_.push_back(*tokenizer.eos());
  if (prompt_.empty())
    fail(Exit::usage, "the prompt has no tokens, and this tokenizer has no beginning token to start from");
  for (int32_t id : prompt_)
    if (id >= spec.vocab_size)
      fail(Exit::data,
           "the tokenizer gives id {}, the model's vocabulary ends at {}; is it the right tokenizer?", id,
           spec.vocab_size);
  const auto asked = static_cast<int64_t>(prompt_.size()) + max_tokens;
  const int64_t length = spec.learned_positions ? std::min(asked, spec.max_positions) : asked;
  if (static_cast<int64_t>(prompt_.size()) >= length)
    fail(Exit::usage, "the prompt has {} tokens, which leaves no room in the model's {} positions",
         prompt_.size(), spec.max_positions);
  exec_.kernels = &ops::cpu_kernels(cpu::best_isa());
  exec_.threads = threads;
  std::vector<model::ParameterView> views;
  for (const Tensor& weight : weights) views.push_back({weight, {}});
  inference_ = std::make_unique<model::Inference>(spec, parameters, std::move(views), exec_, length);
}

void TextGenerator::run(const SamplingOptions& options, const std::function<void(std::string_view)>& print) {
  const PhiloxStream random(options.seed, "generate");
  std::vector<int32_t> made, order;
  size_t printed = 0;
  inference_->reset();
  std::span<const float> logits = inference_->append(prompt_);
  while (true) {
    // Ids that the model has and the tokenizer does not (a padded vocabulary) are never chosen.
    const auto usable = std::min<size_t>(logits.size(), static_cast<size_t>(tokenizer_.vocab_size()));
    const int32_t next = sample_token(logits.first(usable), options, random.uniform(made.size()), order);
    if (tokenizer_.eos() == next) return;
    made.push_back(next);
    // Text is decoded as a whole: a character may take several tokens.
    const std::string text = tokenizer_.decode(made);
    if (const size_t complete = complete_bytes(text); complete > printed) {
      print(std::string_view(text).substr(printed, complete - printed));
      printed = complete;
    }
    if (static_cast<int64_t>(made.size()) == max_tokens_ || inference_->length() == inference_->max_tokens())
      return;
    logits = inference_->append(std::span(&next, 1));
  }
}

}  // namespace nrl::train
