#include "apps/rollout/generator.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "apps/rollout/likeliest.h"
#include "core/base/error.h"
#include "core/device/cpu/parallel.h"

namespace nrl::rollout {

LocalGenerator::LocalGenerator(const model::ModelSpec& spec, const model::ParameterList& parameters,
                               std::vector<model::ParameterView> views, const ops::Exec& exec,
                               const model::GenerationLimits& limits, const model::ModelLayout& layout,
                               const parallel::Groups* groups, int threads)
    : pass_(spec, parameters, std::move(views), exec, limits, layout, groups),
      scheduler_({.tokens = limits.tokens, .sequences = limits.sequences}, limits.pages, limits.page_tokens),
      threads_(std::max(threads > 0 ? threads : exec.threads, 1)),
      vocabulary_(std::min(limits.vocabulary > 0 ? limits.vocabulary : spec.vocab_size, spec.vocab_size)) {
  NRL_CHECK(scheduler_.pages().pages_of(limits.longest) <= limits.pages,
            "sequences of {} tokens in {} pages of {}", limits.longest, limits.pages, limits.page_tokens);
}

void LocalGenerator::submit(std::span<const Request> requests, const SamplingOptions& options) {
  NRL_CHECK(options.max_new_tokens > 0 && options.temperature >= 0, "{} new tokens at temperature {}",
            options.max_new_tokens, options.temperature);
  for (const Request& r : requests) {
    NRL_CHECK(r.prompt && !r.prompt->empty(), "request {} has no prompt", r.id);
    const auto size = static_cast<int64_t>(r.prompt->size());
    // The last token has no row.
    if (size + options.max_new_tokens - 1 > pass_.limits().longest)
      fail(Exit::usage,
           "the prompt is too long: {} tokens and {} new ones; there is room for {}. Fix: shorten it", size,
           options.max_new_tokens, pass_.limits().longest);
    for (const int32_t id : *r.prompt)
      if (id < 0 || id >= pass_.vocabulary())
        fail(Exit::data,
             "the prompt has token {}, but the model's vocabulary has {} tokens. Fix: use the model's "
             "tokenizer",
             id, pass_.vocabulary());
  }
  const auto shared = std::make_shared<const SamplingOptions>(options);
  for (size_t begin = 0, end; begin < requests.size(); begin = end) {
    const std::vector<int32_t>& prompt = *requests[begin].prompt;
    for (end = begin + 1; end < requests.size() && requests[end].prompt == requests[begin].prompt;) ++end;
    const auto size = static_cast<int64_t>(prompt.size());
    int64_t sequence =
        scheduler_.add(size, size + options.max_new_tokens - 1, static_cast<int64_t>(end - begin));
    for (size_t i = begin; i < end; ++i)
      sequences_.emplace(
          sequence++,
          Sequence{
              .tokens = prompt,
              .prompt = size,
              .completion = {.id = requests[i].id, .ids = {}, .log_probs = {}, .weight_version = version_},
              .options = shared,
              .seed = requests[i].seed.value_or(options.seed),
              .sample = requests[i].seed ? 0 : requests[i].id});
  }
}

std::optional<Completion> LocalGenerator::next() {
  while (done_.empty()) {
    const Pass pass = scheduler_.next();
    if (pass.rows.empty()) return {};
    run(pass);
  }
  Completion c = std::move(done_.front());
  done_.pop_front();
  return c;
}

void LocalGenerator::run(const Pass& pass) {
  const auto begin = std::chrono::steady_clock::now();
  for (const auto& [from, to] : pass.copies) pass_.copy_page(from, to);
  model::GenerationRows rows;
  std::vector<int64_t> sampled;
  int64_t row = 0;
  for (const PassRows& r : pass.rows) {
    const std::vector<int32_t>& tokens = sequences_.at(r.sequence).tokens;
    rows.sequences.push_back(
        {.tokens = std::span(tokens).subspan(static_cast<size_t>(r.first), static_cast<size_t>(r.count)),
         .first = r.first,
         .pages = r.pages});
    row += r.count;
    for (const int64_t id : r.sampled) {
      const Sequence& s = sequences_.at(id);
      rows.sampled.push_back(static_cast<int32_t>(row - 1));
      sampled.push_back(id);
      rows.keys.push_back({.temperature = static_cast<float>(s.options->temperature),
                           .seed = static_cast<int64_t>(s.seed),
                           .sample = s.sample,
                           .position = static_cast<int32_t>(s.tokens.size())});
    }
  }
  rows.sample_later = std::any_of(sampled.begin(), sampled.end(),
                                  [this](int64_t id) { return sequences_.at(id).options->restricted(); });
  pass_.run(rows);
  if (rows.sample_later) restrict(sampled);
  const std::vector<model::SampledToken> next = pass_.tokens();
  ++counts_.passes;
  const int64_t prompts =
      row - static_cast<int64_t>(std::count_if(pass.rows.begin(), pass.rows.end(), [this](const PassRows& r) {
        return r.count == 1 && r.first >= sequences_.at(r.sequence).prompt;
      }));
  counts_.sampled_tokens += static_cast<int64_t>(next.size());
  counts_.prompt_tokens += prompts;
  if (prompts == 0) counts_.decoded_tokens += static_cast<int64_t>(next.size());
  (prompts == 0 ? counts_.decode_seconds : counts_.prefill_seconds) +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (size_t i = 0; i < next.size(); ++i) append(sampled[i], next[i]);
}

void LocalGenerator::restrict(std::span<const int64_t> sequences) {
  const std::span<float> logits = pass_.logits();
  const auto vocabulary = static_cast<size_t>(pass_.vocabulary());
  cpu::parallel_tasks(threads_, std::ssize(sequences), [&](int64_t i, int64_t) {
    const SamplingOptions& options = *sequences_.at(sequences[static_cast<size_t>(i)]).options;
    if (options.restricted())
      keep_likeliest(logits.subspan(static_cast<size_t>(i) * vocabulary, vocabulary), vocabulary_,
                     {.temperature = options.temperature, .top_k = options.top_k, .top_p = options.top_p});
  });
  pass_.sample();
}

void LocalGenerator::append(int64_t sequence, const model::SampledToken& sampled) {
  const auto at = sequences_.find(sequence);
  Sequence& s = at->second;
  if (sampled.token < 0)
    fail(Exit::diverged, "generation: the logits of request {} are not finite at position {}",
         s.completion.id, s.tokens.size());
  s.tokens.push_back(sampled.token);
  s.completion.ids.push_back(sampled.token);
  s.completion.log_probs.push_back(sampled.log_prob);
  const std::vector<int32_t>& stops = s.options->stop_ids;
  const bool stopped = std::find(stops.begin(), stops.end(), sampled.token) != stops.end(),
             asked = s.options->on_token && s.options->on_token(s.completion.id, sampled.token),
             full = static_cast<int64_t>(s.completion.ids.size()) == s.options->max_new_tokens;
  if (!stopped && !asked && !full) return scheduler_.grow(sequence);
  s.completion.finish = stopped || asked ? Finish::stop : Finish::length;
  done_.push_back(std::move(s.completion));
  sequences_.erase(at);
  scheduler_.finish(sequence);
}

void LocalGenerator::weights_changed(int64_t version) {
  NRL_CHECK(scheduler_.idle(), "weights change while {} sequences are generated", sequences_.size());
  version_ = version;
}

GeneratorCounts LocalGenerator::counts() const {
  GeneratorCounts c = counts_;
  c.preemptions = scheduler_.preemptions();
  c.replays = pass_.replays();
  return c;
}

}  // namespace nrl::rollout
