// Generation against training's forward pass: the same text in every batch and layout of pages, and the
// log-probabilities that an evaluation of the text gives.
#include "apps/rollout/generator.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/model/tiny_model.h"

using namespace nrl;
using rollout::Completion;
using rollout::Finish;
using rollout::LocalGenerator;
using rollout::Request;
using rollout::SamplingOptions;
using test::TinyModel;

namespace {

constexpr int64_t longest = 12;  // of TinyModel's evaluations

std::vector<model::ParameterView> weights_of(TinyModel& m) {
  std::vector<model::ParameterView> views;
  for (size_t i = 0; i < m.weights_.size(); ++i) {
    const auto& shape = m.parameters_.all[i].shape;
    float* data = m.weights_[i].data();
    views.push_back({shape.size() == 1 ? make_tensor(data, DType::f32, {shape[0]})
                                       : make_tensor(data, DType::f32, {shape[0], shape[1]}),
                     {}});
  }
  return views;
}

LocalGenerator generator(TinyModel& m, model::GenerationLimits limits, int64_t vocabulary = 0) {
  limits.longest = longest;
  return LocalGenerator(m.spec_, m.parameters_, weights_of(m), m.exec_,
                        {.pass = limits, .vocabulary = vocabulary});
}

/// 3 prompts of 1, 4 and 6 tokens with 2, 5 and 1 samples.
std::vector<Request> requests() {
  std::vector<Request> all;
  int64_t id = 100;
  for (const auto& [tokens, samples] : {std::pair{1, 2}, {4, 5}, {6, 1}}) {
    std::vector<int32_t> prompt;
    for (int i = 0; i < tokens; ++i) prompt.push_back((i * i + 7 * tokens + 3 * i) % 29);
    const auto shared = std::make_shared<const std::vector<int32_t>>(std::move(prompt));
    for (int i = 0; i < samples; ++i) all.push_back({id++, shared});
  }
  return all;
}

using Completions = std::map<int64_t, Completion>;

Completions all_of(LocalGenerator& g, const std::vector<Request>& of, const SamplingOptions& options) {
  g.submit(of, options);
  Completions all;
  while (std::optional<Completion> c = g.next()) REQUIRE(all.emplace(c->id, std::move(*c)).second);
  REQUIRE(g.pages().free() == g.pages().count());
  REQUIRE(all.size() == of.size());
  return all;
}

/// Log-probabilities of the tokens after the prompt, by an evaluation of the whole sequence.
std::vector<float> evaluated(TinyModel& m, const std::vector<int32_t>& prompt,
                             const std::vector<int32_t>& ids) {
  std::vector<int32_t> tokens = prompt, positions, target;
  tokens.insert(tokens.end(), ids.begin(), ids.end());
  const auto n = static_cast<int64_t>(tokens.size());
  for (int32_t i = 0; i < n; ++i) {
    positions.push_back(i);
    target.push_back(i + 1 < n ? tokens[static_cast<size_t>(i) + 1] : -1);
  }
  std::vector<int32_t> cu{0, static_cast<int32_t>(n)};
  model::MicroBatch b = m.batch();
  b.ids = make_tensor(tokens.data(), DType::i32, {n});
  b.target = make_tensor(target.data(), DType::i32, {n});
  b.positions = make_tensor(positions.data(), DType::i32, {n});
  b.cu_seqlens = make_tensor(cu.data(), DType::i32, {2});
  b.lengths = {n, false};
  m.decoder_.evaluate(b);
  const float* all = m.decoder_.log_prob(b).ptr<float>();
  return {all + prompt.size() - 1, all + n - 1};
}

void check_log_probs(TinyModel& m, const std::vector<Request>& of, const Completions& all) {
  for (const Request& r : of) {
    const Completion& c = all.at(r.id);
    REQUIRE(c.log_probs.size() == c.ids.size());
    const std::vector<float> want = evaluated(m, *r.prompt, c.ids);
    for (size_t i = 0; i < want.size(); ++i) {
      INFO("request " << r.id << ", token " << i << ": " << c.log_probs[i] << ", evaluated " << want[i]);
      CHECK(std::abs(c.log_probs[i] - want[i]) < 2e-5f);
    }
  }
}

}  // namespace

TEST_CASE("text and log-probabilities do not depend on batch, pages or preemption", "[rollout]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    // A capacity of experts drops tokens of training by batch.
    if (name.find("capacity") != std::string::npos) continue;
    TinyModel m(config, ops::cpu_kernels(cpu::best_isa()), 1);
    const std::vector<Request> of = requests();
    const SamplingOptions options{.max_new_tokens = 6, .seed = 7};
    LocalGenerator alone = generator(m, {.tokens = 12, .sequences = 1, .pages = 1, .page_tokens = 12});
    const Completions want = all_of(alone, of, options);
    check_log_probs(m, of, want);
    int64_t preempted = 0;
    for (const model::GenerationLimits& limits :
         {model::GenerationLimits{.tokens = 64, .sequences = 16, .pages = 40, .page_tokens = 4},
          model::GenerationLimits{.tokens = 5, .sequences = 5, .pages = 12, .page_tokens = 1},
          model::GenerationLimits{.tokens = 9, .sequences = 8, .pages = 8, .page_tokens = 3},
          model::GenerationLimits{.tokens = 2, .sequences = 2, .pages = 4, .page_tokens = 5}}) {
      INFO(limits.tokens << " tokens in " << limits.pages << " pages of " << limits.page_tokens);
      LocalGenerator g = generator(m, limits);
      const Completions got = all_of(g, of, options);
      for (const auto& [id, c] : want) {
        CHECK(got.at(id).ids == c.ids);
        CHECK(c.ids.size() == 6);
        CHECK(c.finish == Finish::length);
      }
      check_log_probs(m, of, got);
      preempted += g.counts().preemptions;
    }
    CHECK(preempted > 0);
    CHECK(want.at(100).ids != want.at(101).ids);
  }
}

TEST_CASE("a prompt of several samples is computed once", "[rollout]") {
  TinyModel m(test::tiny_configs()[2].second, ops::cpu_kernels(cpu::best_isa()), 1);
  LocalGenerator g = generator(m, {.tokens = 64, .sequences = 16, .pages = 40, .page_tokens = 4});
  all_of(g, requests(), {.max_new_tokens = 3});
  CHECK(g.counts().prompt_tokens == 1 + 4 + 6);
  CHECK(g.counts().sampled_tokens == 8 * 3);
  CHECK(g.counts().passes == 3);
}

TEST_CASE("temperature, seed and stop tokens", "[rollout]") {
  TinyModel m(test::tiny_configs()[2].second, ops::cpu_kernels(cpu::best_isa()), 1);
  LocalGenerator g = generator(m, {.tokens = 64, .sequences = 16, .pages = 40, .page_tokens = 4});
  const std::vector<Request> of = requests();
  const Completions one = all_of(g, of, {.max_new_tokens = 6, .seed = 1}),
                    again = all_of(g, of, {.max_new_tokens = 6, .seed = 1}),
                    two = all_of(g, of, {.max_new_tokens = 6, .seed = 2}),
                    greedy = all_of(g, of, {.max_new_tokens = 6, .temperature = 0});
  int same = 0;
  for (const auto& [id, c] : one) {
    CHECK(again.at(id).ids == c.ids);
    same += two.at(id).ids == c.ids;
  }
  CHECK(same < 2);
  CHECK(greedy.at(102).ids == greedy.at(106).ids);
  check_log_probs(m, of, greedy);
  // A stop token ends the text and belongs to it.
  const std::vector<int32_t>& ids = one.at(107).ids;
  const Completions stopped = all_of(g, of, {.max_new_tokens = 6, .stop_ids = {ids[2]}, .seed = 1});
  const auto first = std::find(ids.begin(), ids.end(), ids[2]);
  CHECK(stopped.at(107).ids == std::vector<int32_t>(ids.begin(), first + 1));
  CHECK(stopped.at(107).finish == Finish::stop);
  std::map<int64_t, std::vector<int32_t>> seen;
  const Completions asked =
      all_of(g, of, {.max_new_tokens = 6, .seed = 1, .on_token = [&](int64_t id, int32_t token) {
                       seen[id].push_back(token);
                       return seen[id].size() == 2;
                     }});
  for (const auto& [id, c] : asked) {
    CHECK(c.ids == seen.at(id));
    CHECK(c.ids == std::vector<int32_t>(one.at(id).ids.begin(), one.at(id).ids.begin() + 2));
  }
}

TEST_CASE("only tokens of the tokenizer are sampled; requests are checked", "[rollout]") {
  TinyModel m(test::tiny_configs()[2].second, ops::cpu_kernels(cpu::best_isa()), 1);
  LocalGenerator g = generator(m, {.tokens = 64, .sequences = 16, .pages = 40, .page_tokens = 4}, 5);
  const Completions all = all_of(g, requests(), {.max_new_tokens = 6});
  for (const auto& [id, c] : all)
    for (const int32_t token : c.ids) CHECK(token < 5);
  check_log_probs(m, requests(), all);  // the softmax has the whole vocabulary
  const auto prompt = [](std::vector<int32_t> ids) {
    return std::make_shared<const std::vector<int32_t>>(std::move(ids));
  };
  CHECK_THROWS_AS(
      g.submit(std::vector<Request>{{1, prompt({1})}, {2, prompt({1, 67})}}, {.max_new_tokens = 2}), Error);
  CHECK_THROWS_AS(g.submit(std::vector<Request>{{1, prompt({1, 2})}}, {.max_new_tokens = 12}), Error);
  CHECK(!g.next());
  g.submit(std::vector<Request>{{1, prompt({1, 2})}}, {.max_new_tokens = 2});
  CHECK_THROWS_AS(g.weights_changed(3), Error);
  CHECK(g.next()->weight_version == 0);
  g.weights_changed(3);
  g.submit(std::vector<Request>{{1, prompt({1, 2})}}, {.max_new_tokens = 2});
  CHECK(g.next()->weight_version == 3);
}

TEST_CASE("the host may choose tokens from logits, and a sequence may fill all positions", "[rollout]") {
  TinyModel m(test::tiny_configs().begin()->second, ops::cpu_kernels(cpu::best_isa()), 1);
  const std::vector<Request> of = requests();
  LocalGenerator g = generator(m, {.tokens = 64, .sequences = 16, .pages = 40, .page_tokens = 4}, 5);
  SamplingOptions options{.max_new_tokens = 7, .temperature = 0};  // 6 + 7 - 1 tokens have rows
  const Completions device = all_of(g, of, options);
  std::map<int64_t, int> asked;
  options.choose = [&](int64_t id, std::span<const float> logits) {
    ++asked[id];
    REQUIRE(logits.size() == 5);
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  };
  const Completions host = all_of(g, of, options);
  for (const auto& [id, c] : host) {
    CHECK(c.ids == device.at(id).ids);
    CHECK(asked[id] == 7);
    CHECK(c.log_probs.empty());
  }
  const rollout::GeneratorCounts counts = g.counts();
  CHECK(counts.sampled_tokens == 2 * 8 * 7);
  CHECK(counts.decoded_tokens > 0);
  CHECK(counts.decoded_tokens < counts.sampled_tokens);
  CHECK((counts.prefill_seconds > 0 && counts.decode_seconds > 0));
}

TEST_CASE("the memory of generation is known without allocating it", "[rollout]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    TinyModel m(config, ops::cpu_kernels(cpu::best_isa()), 1);
    const model::GenerationLimits limits{
        .tokens = 20, .sequences = 7, .longest = longest, .pages = 40, .page_tokens = 4};
    const model::GenerationMemory planned =
        model::GenerationPass::memory(m.spec_, m.parameters_, weights_of(m), m.exec_, limits);
    CHECK(planned.pages == 40 * model::GenerationPass::page_bytes(m.spec_, {}, 4, DType::f32));
    CHECK(planned.buffers > 7 * m.spec_.vocab_size * 4);
    const LocalGenerator g = generator(m, limits);
    CHECK(g.memory().pages == planned.pages);
    CHECK(g.memory().buffers == planned.buffers);
  }
}
