#include "apps/train/loop/text_generator.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <optional>
#include <utility>

#include "core/base/error.h"
#include "core/base/text.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/memory.h"
#include "core/ops/cpu_choice.h"
#include "core/ops/kernel_table.h"
#include "core/trace/trace.h"

namespace nrl::train {

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
                             int64_t max_tokens, const ops::Exec& exec, int threads)
    : spec_(spec),
      parameters_(parameters),
      weights_(weights),
      tokenizer_(tokenizer),
      max_tokens_(max_tokens),
      exec_(exec),
      threads_(threads) {}

TextGenerator::TextGenerator(const model::ModelSpec& spec, const model::ParameterList& parameters,
                             const std::vector<Tensor>& weights, const data::Tokenizer& tokenizer,
                             data::Prompt prompt, int64_t max_tokens, const ops::Exec& exec, int threads)
    : TextGenerator(spec, parameters, weights, tokenizer, max_tokens, exec, threads) {
  set_prompt(std::move(prompt));
}

int64_t TextGenerator::length_of(const data::Prompt& prompt) const {
  NRL_CHECK(!prompt.ids.empty());
  for (int32_t id : prompt.ids)
    if (id >= spec_.vocab_size)
      fail(Exit::data,
           "the tokenizer gives id {}, but the model's vocabulary has {} tokens. Fix: use the model's "
           "tokenizer",
           id, spec_.vocab_size);
  const auto size = static_cast<int64_t>(prompt.ids.size());
  const int64_t length =
      spec_.learned_positions ? std::min(size + max_tokens_, spec_.max_positions) : size + max_tokens_;
  if (size >= length)
    fail(Exit::usage, "the prompt is too long: {} tokens, but the model has {} positions. Fix: shorten it",
         size, spec_.max_positions);
  return length;
}

void TextGenerator::set_prompt(data::Prompt prompt) {
  reserve(length_of(prompt), 1);
  prompt_ = std::move(prompt);
}

void TextGenerator::reserve(int64_t longest, int64_t sequences) {
  if (longest <= longest_ && sequences <= sequences_) return;
  const int64_t grown = spec_.learned_positions ? std::min(2 * longest_, spec_.max_positions) : 2 * longest_;
  longest_ = longest <= longest_ ? longest_ : std::max(longest, grown);
  sequences_ = std::max(sequences, sequences_);
  generator_.reset();  // before the memory of a larger one is allocated
  std::vector<model::ParameterView> views;
  for (const Tensor& weight : weights_) views.push_back({weight, {}});
  constexpr int64_t chunk_tokens = 128;  // prompt tokens of a pass
  model::GenerationLimits pass{.longest = longest_, .vocabulary = tokenizer_.vocab_size(), .graphs = graphs_};
  const int64_t of_sequence = (longest_ + pass.page_tokens - 1) / pass.page_tokens;
  const int64_t page = model::GenerationPass::page_bytes(spec_, {}, pass.page_tokens,
                                                         views[parameters_.embedding].weight.dtype);
  const size_t room = exec_.device ? exec_.device->free_memory() : cpu::obtainable_memory();
  // One page more for each sequence: a shared prompt's last page is copied.
  pass.pages = sequences_ == 1 ? of_sequence
                               : std::clamp(static_cast<int64_t>(room / 2) / page, of_sequence,
                                            sequences_ * (of_sequence + 1));
  pass.sequences = sequences_;
  pass.tokens = sequences_ == 1 ? std::min(chunk_tokens, longest_) : std::max(4 * chunk_tokens, sequences_);
  generator_ = std::make_unique<rollout::LocalGenerator>(spec_, parameters_, std::move(views), exec_, pass,
                                                         model::ModelLayout{}, nullptr, threads_);
}

bool TextGenerator::run(const SamplingOptions& options, const std::function<void(std::string_view)>& print) {
  bool ended = false;
  generate(
      {&prompt_, 1}, 1, options, [&](size_t, std::string_view piece) { print(piece); },
      [&](size_t, bool end) { ended = end; });
  return ended;
}

void TextGenerator::run_all(std::span<const data::Prompt> prompts, int64_t samples,
                            const SamplingOptions& options,
                            const std::function<void(size_t, const Text&)>& done) {
  constexpr int64_t at_once = 64;
  int64_t longest = 0;
  for (const data::Prompt& prompt : prompts) longest = std::max(longest, length_of(prompt));
  reserve(longest, std::min(at_once, static_cast<int64_t>(prompts.size()) * samples));
  std::vector<Text> texts(prompts.size() * static_cast<size_t>(samples));
  generate(
      prompts, samples, options, [&](size_t i, std::string_view piece) { texts[i].text += piece; },
      [&](size_t i, bool ended) {
        texts[i].ended = ended;
        done(i, texts[i]);
      });
}

void TextGenerator::generate(std::span<const data::Prompt> prompts, int64_t samples,
                             const SamplingOptions& options,
                             const std::function<void(size_t, std::string_view)>& print,
                             const std::function<void(size_t, bool)>& done) {
  struct Growing {
    const data::Prompt& prompt;
    TextStream text;
    TextEnd end;
  };
  std::deque<Growing> all;
  for (const data::Prompt& prompt : prompts)
    for (int64_t i = 0; i < samples; ++i)
      all.push_back({prompt, TextStream(tokenizer_, prompt.ids), TextEnd(prompt.end_text)});
  const auto show = [&](int64_t i, const std::string& piece) {
    if (!piece.empty()) print(static_cast<size_t>(i), piece);
  };
  const rollout::GeneratorCounts before = generator_->counts();
  const auto begin = std::chrono::steady_clock::now();
  speed_.first_token_seconds = 0;
  const auto on_token = [&](int64_t id, int32_t token) {
    if (speed_.first_token_seconds == 0)
      speed_.first_token_seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    Growing& g = all[static_cast<size_t>(id)];
    const std::vector<int32_t>& ends = g.prompt.end_ids;
    if (std::find(ends.begin(), ends.end(), token) == ends.end())
      show(id, g.end.append(g.text.append(token)));
    return g.end.reached();
  };
  for (size_t p = 0; p < prompts.size(); ++p) {
    const auto ids = std::make_shared<const std::vector<int32_t>>(prompts[p].ids);
    std::vector<rollout::Request> requests;
    for (int64_t i = 0; i < samples; ++i) {
      const int64_t id = static_cast<int64_t>(p) * samples + i;
      requests.push_back({.id = id, .prompt = ids, .seed = options.seed + static_cast<uint64_t>(id)});
    }
    // The last token needs no position.
    const int64_t room = length_of(prompts[p]) + 1 - std::ssize(*ids);
    generator_->submit(requests, {.max_new_tokens = std::min(max_tokens_, room),
                                  .temperature = options.temperature,
                                  .top_k = options.top_k,
                                  .top_p = options.top_p,
                                  .stop_ids = prompts[p].end_ids,
                                  .on_token = on_token});
  }
  while (const std::optional<rollout::Completion> c = generator_->next()) {
    show(c->id, all[static_cast<size_t>(c->id)].end.rest());
    done(static_cast<size_t>(c->id), c->finish == rollout::Finish::stop);
  }
  const rollout::GeneratorCounts after = generator_->counts();
  speed_.prompt_tokens += after.prompt_tokens - before.prompt_tokens;
  speed_.decoded_tokens += after.decoded_tokens - before.decoded_tokens;
  speed_.prefill_seconds += after.prefill_seconds - before.prefill_seconds;
  speed_.decode_seconds += after.decode_seconds - before.decode_seconds;
}

}  // namespace nrl::train
