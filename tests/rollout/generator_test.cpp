// Generation against training's forward pass: the same text in every batch and layout of pages, and the
// log-probabilities that an evaluation of the text gives.
#include "apps/rollout/generator.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <utility>

#include "core/base/error.h"
#include "core/ops/transfer.h"
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
  limits.vocabulary = vocabulary;
  return LocalGenerator(m.spec_, m.parameters_, weights_of(m), m.exec_, limits);
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

/// `count`: all requests in progress, if some were submitted before; 0: none were.
Completions all_of(LocalGenerator& g, const std::vector<Request>& of, const SamplingOptions& options,
                   size_t count = 0) {
  g.submit(of, options);
  Completions all;
  while (std::optional<Completion> c = g.next()) REQUIRE(all.emplace(c->id, std::move(*c)).second);
  REQUIRE(g.pages().free() == g.pages().count());
  REQUIRE(all.size() == (count > 0 ? count : of.size()));
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

TEST_CASE("a sequence may fill all positions; passes of prompts and of decoding are counted", "[rollout]") {
  TinyModel m(test::tiny_configs().begin()->second, ops::cpu_kernels(cpu::best_isa()), 1);
  const std::vector<Request> of = requests();
  LocalGenerator g = generator(m, {.tokens = 64, .sequences = 16, .pages = 40, .page_tokens = 4}, 5);
  for (const auto& [id, c] : all_of(g, of, {.max_new_tokens = 7, .temperature = 0}))  // 6 + 7 - 1 have rows
    CHECK(c.ids.size() == 7);
  const rollout::GeneratorCounts counts = g.counts();
  CHECK(counts.sampled_tokens == 8 * 7);
  CHECK(counts.decoded_tokens > 0);
  CHECK(counts.decoded_tokens < counts.sampled_tokens);
  CHECK((counts.prefill_seconds > 0 && counts.decode_seconds > 0));
  CHECK(counts.replays == 0);
}

TEST_CASE("top-k and top-p leave tokens out, whatever else is generated", "[rollout]") {
  TinyModel m(test::tiny_configs()[2].second, ops::cpu_kernels(cpu::best_isa()), 2);
  LocalGenerator g = generator(m, {.tokens = 64, .sequences = 16, .pages = 40, .page_tokens = 4}, 5);
  const std::vector<Request> of = requests();
  const SamplingOptions free{.max_new_tokens = 6, .temperature = 3, .seed = 4};
  SamplingOptions options = free;
  // Without a token left out, the same choices.
  options.top_k = 5;
  const Completions unlimited = all_of(g, of, free), all_five = all_of(g, of, options);
  for (const auto& [id, c] : all_five) CHECK(c.ids == unlimited.at(id).ids);
  // One token is left, which greedy sampling takes too, with certainty.
  const Completions greedy = all_of(g, of, {.max_new_tokens = 6, .temperature = 0});
  for (const auto& [top_k, top_p] : {std::pair{1, 1.0}, {0, 0.0}}) {
    options.top_k = top_k, options.top_p = top_p;
    for (const auto& [id, c] : all_of(g, of, options)) {
      CHECK(c.ids == greedy.at(id).ids);
      for (const float log_prob : c.log_probs) CHECK(std::abs(log_prob) < 1e-6f);
    }
  }
  // Two: other texts than greedy, and a pass may have sequences of both kinds.
  options.top_k = 2, options.top_p = 1;
  const Completions two = all_of(g, of, options);
  int64_t others = 0;
  for (const auto& [id, c] : two) {
    others += c.ids != greedy.at(id).ids && c.ids != unlimited.at(id).ids;
    for (const float log_prob : c.log_probs) CHECK(log_prob <= 0);
  }
  CHECK(others > 0);
  g.submit(std::span(of).first(4), options);
  g.submit(std::span(of).subspan(4), free);
  while (std::optional<Completion> c = g.next())
    CHECK(c->ids == (c->id < 104 ? two : unlimited).at(c->id).ids);
}

TEST_CASE("a request with a seed of its own has its text under any number", "[rollout]") {
  TinyModel m(test::tiny_configs()[2].second, ops::cpu_kernels(cpu::best_isa()), 1);
  LocalGenerator g = generator(m, {.tokens = 64, .sequences = 16, .pages = 40, .page_tokens = 4});
  std::vector<Request> of = requests();
  for (Request& r : of) r.seed = 9;
  const Completions same = all_of(g, of, {.max_new_tokens = 6, .seed = 1});
  for (int64_t id = 103; id <= 106; ++id) CHECK(same.at(id).ids == same.at(102).ids);
  of.assign(1, {.id = 0, .prompt = of[2].prompt});
  CHECK(all_of(g, of, {.max_new_tokens = 6, .seed = 9}).at(0).ids == same.at(102).ids);
}

namespace {

/// A generator of a tiny model whose weights are on the simulated device, where work is deferred.
struct OnDevice {
  OnDevice(TinyModel& m, const model::GenerationLimits& limits)
      : OnDevice(weights_of(m), [&](const ops::Exec& on, std::vector<model::ParameterView> views) {
          return std::make_unique<LocalGenerator>(m.spec_, m.parameters_, std::move(views), on, limits,
                                                  model::ModelLayout{}, nullptr, 3);
        }) {}
  /// `make`: creates the generator on the device, of `views` of host memory that is copied there.
  template <class Make>
  OnDevice(std::vector<model::ParameterView> views, const Make& make)
      : stream(*runtime), libraries(ops::open_sim_libraries(*runtime, {})) {
    runtime->bind_thread();
    exec.kernels = &ops::sim_kernels();
    exec.reduction_blocks = ops::gpu_partials;
    exec.multiprocessors = runtime->properties().multiprocessors;
    exec.device = runtime.get();
    exec.stream = stream.get();
    exec.libraries = libraries.get();
    for (model::ParameterView& view : views) {
      weights.emplace_back(*runtime, device::Memory::Kind::device, static_cast<size_t>(view.weight.bytes()));
      const void* const host = std::exchange(view.weight.data, weights.back().data());
      ops::upload(exec, view.weight, host);
    }
    generator = make(exec, std::move(views));
  }
  std::unique_ptr<device::Runtime> runtime = device::open_sim();
  device::Stream stream;
  std::unique_ptr<ops::Libraries> libraries;
  ops::Exec exec;
  std::vector<device::Memory> weights;
  std::unique_ptr<LocalGenerator> generator;
};

}  // namespace

TEST_CASE("a GPU replays decoding passes as graphs, with the same bits", "[rollout][sim]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    const bool capacity = name.find("capacity") != std::string::npos;
    TinyModel m(config, ops::cpu_kernels(cpu::best_isa()), 1);
    const std::vector<Request> of = requests();
    model::GenerationLimits limits{
        .tokens = 64, .sequences = 16, .longest = longest, .pages = 40, .page_tokens = 4};
    LocalGenerator on_host = generator(m, limits);
    OnDevice replayed(m, limits);
    limits.graphs = false;
    OnDevice immediate(m, limits);
    CHECK(replayed.generator->no_graphs().empty() == !capacity);
    CHECK(!immediate.generator->no_graphs().empty());
    CHECK(immediate.generator->threads() == 3);  // of the host, though the device's exec has one
    CHECK(immediate.exec.threads == 1);
    for (const uint64_t seed : {1, 2, 3}) {
      SamplingOptions options{.max_new_tokens = 3, .seed = seed};
      if (seed == 3) options.top_k = 4;
      // Decoding passes of 8, of 7, of 3, which are padded to 4, and of 1.
      const auto all = [&](LocalGenerator& g) {
        SamplingOptions longer = options;
        longer.max_new_tokens = 6;
        g.submit(std::span(of).subspan(1, 2), longer);
        longer.max_new_tokens = 7;
        g.submit(std::span(of).last(1), longer);
        longer.max_new_tokens = 2;
        g.submit(std::span(of).first(1), longer);
        return all_of(g, {of.begin() + 3, of.end() - 1}, options, of.size());
      };
      const Completions host = all(on_host), a = all(*replayed.generator), b = all(*immediate.generator);
      for (const auto& [id, c] : a) {
        CHECK(c.ids == b.at(id).ids);
        CHECK(c.log_probs == b.at(id).log_probs);
        if (!capacity) CHECK(c.ids == host.at(id).ids);
      }
      if (!capacity && seed < 3) check_log_probs(m, of, a);
    }
    CHECK((replayed.generator->counts().replays > 8) == !capacity);
    CHECK(immediate.generator->counts().replays == 0);
    CHECK(replayed.generator->counts().passes == immediate.generator->counts().passes);
  }
}

TEST_CASE("tensor-parallel ranks do not replay decoding passes, which would wait without a limit",
          "[rollout][sim]") {
  // No watchdog sees the collectives inside a graph, and a lost rank would block the others for ever.
  const model::ModelSpec spec = test::tiny_spec(test::tiny_configs()[2].second, {});
  const model::GenerationLimits limits{
      .tokens = 64, .sequences = 16, .longest = longest, .pages = 40, .page_tokens = 4};
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const model::ModelLayout layout{.tensor = ranks};
    const model::ParameterList parameters = model::make_parameters(spec, layout);
    std::vector<std::vector<float>> host;
    std::vector<model::ParameterView> views;
    for (const model::Parameter& p : parameters.all) {
      host.emplace_back(static_cast<size_t>(p.numel()), 0.01f);
      views.push_back({p.view(reinterpret_cast<std::byte*>(host.back().data()), DType::f32), {}});
    }
    const std::vector<parallel::GroupId> ids{parallel::group::tp};
    std::unique_ptr<parallel::Groups> groups;
    OnDevice g(std::move(views), [&](const ops::Exec& exec, std::vector<model::ParameterView> on_device) {
      groups = std::make_unique<parallel::Groups>(parallel::ProcessGrid({.tp = ranks}, ranks, 0), ids,
                                                  std::span<const parallel::GroupChannels>(), exec.device);
      return std::make_unique<LocalGenerator>(spec, parameters, std::move(on_device), exec, limits, layout,
                                              groups.get());
    });
    CHECK(g.generator->no_graphs() == (ranks == 1 ? ""
                                                  : "a replayed graph of tensor-parallel ranks would wait "
                                                    "for a lost rank without a time limit"));
    const Completions all = all_of(*g.generator, requests(), {.max_new_tokens = 4, .seed = 1});
    CHECK(all.size() == requests().size());
    CHECK((g.generator->counts().replays > 0) == (ranks == 1));
    g.generator.reset();
    groups.reset();  // before the device
  }
}

TEST_CASE("decoding passes are padded to few numbers of sequences", "[rollout]") {
  using model::padded_sequences;
  for (const auto& [sequences, padded] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {2, 2}, {3, 4}, {5, 8}, {8, 8}, {9, 16}, {250, 256}})
    CHECK(padded_sequences(sequences, 256) == padded);
  CHECK(padded_sequences(3, 3) == 3);
  CHECK(padded_sequences(18, 20) == 20);
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
