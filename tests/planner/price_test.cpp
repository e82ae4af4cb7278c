// Prices of layouts against their full estimates, and the search against all layouts.

#include "apps/planner/price.h"

#include <cmath>
#include <cstdio>
#include <random>

#include "apps/machine/trainer_kernels.h"
#include "apps/planner/search.h"
#include "apps/state/model_source.h"
#include "apps/train/start/run_check.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::planner;
using namespace nrl::test;

namespace {

std::string yaml(const std::string& model, int batch) {
  return fmt::format(R"(
policy:
  model: {{vocab_size: 32000, hidden_size: 2048, max_position_embeddings: 8192, num_attention_heads: 16, {}}}
  train_global_batch_size: {}
  max_total_sequence_length: 4096
  optimizer: {{lr: 1.0e-4}}
pretrain: {{max_num_steps: 4}}
data: {{train: {{data_path: none}}}}
device: cuda
)",
                     model, batch);
}
const std::string llama =
    "model_type: llama, intermediate_size: 5632, num_hidden_layers: 8, num_key_value_heads: 8";
const std::string uneven =
    "model_type: llama, intermediate_size: 8192, num_hidden_layers: 14, num_key_value_heads: 4, "
    "tie_word_embeddings: true";
const std::string gpt2 = "model_type: gpt2, num_hidden_layers: 12";
const std::string experts =
    "model_type: qwen3_moe, num_hidden_layers: 8, num_key_value_heads: 4, num_experts: 16, "
    "num_experts_per_tok: 4, moe_intermediate_size: 768, intermediate_size: 5632";

machine::DeviceModel h100(const char* trainer) {
  const machine::DeviceModel& model = machine::find_device_model("--device", "h100");
  const machine::TrainedModel trained{.norm = ops::NormKind::rms, .experts = true, .exchanges = true};
  return trainer ? machine::find_trainer(trainer, trained).on(model) : model;
}

/// A configuration in a file, its prices, and full estimates, with our kernels or another trainer's.
struct Setting {
  Setting(const std::string& text, int ranks, double bytes, const char* trainer = nullptr)
      : world(ranks), capacity(bytes), device(h100(trainer), false, 1) {
    file = directory / "model.yaml";
    write_file_atomic(file, text);
    given = load_config(file);
    INFO(render(given.diagnostics));
    REQUIRE(given.ok());
    spec = train::load_model_spec(given);
    for (int at = 0; at < world; at += 8) nodes.push_back({fmt::format("n{}", at), std::min(8, world - at)});
  }
  std::optional<Config> load(const std::vector<std::string>& overrides, int ranks) const {
    ConfigResult config = load_config(file, overrides);
    if (config.ok()) train::check_but_memory(config, {.world = ranks, .files = false});
    return config.ok() ? std::optional(config.config) : std::nullopt;
  }
  Pricer pricer() const {
    return {given.config,
            spec,
            world,
            nodes,
            device,
            capacity,
            1,
            [this](const std::vector<std::string>& keys, int ranks) { return load(keys, ranks); }};
  }
  /// Seconds and bytes; unset if refused.
  std::optional<Price> exact(const Layout& layout) const {
    const std::optional<Config> config = load(layout.overrides(), world);
    if (!config) return std::nullopt;
    plan::StagePlans plans = predict::plan_stages(*config, spec, world, device, capacity);
    Price out{.memory = static_cast<double>(plans.memory())};
    out.seconds = predict::estimate_step(*config, std::move(plans), device, nodes).step;
    return out;
  }

  TemporaryDirectory directory;
  std::string file;
  int world;
  double capacity;
  ConfigResult given;
  model::ModelSpec spec;
  std::vector<ClusterNode> nodes;
  predict::ModeledDevice device;
};

/// A model, ranks and a batch.
struct Case {
  std::string model;
  int world, batch;
  const char* trainer = nullptr;
};
const std::vector<Case> cases{
    {llama, 8, 64},   {uneven, 16, 128},         {gpt2, 4, 32},
    {experts, 8, 64}, {llama, 8, 64, "pytorch"}, {experts, 16, 128, "megatron+deepep+overlap"}};

/// Relative errors of a price.
struct PriceError {
  std::string layout;
  double seconds = 0, bytes = 0, step = 0;
};

/// The bound from the times of a layout's stages.
Price timed_bound(Pricer& pricer, const Layout& layout) {
  const std::optional<Pricer::Composition> parts = pricer.compose(layout);
  REQUIRE(parts);
  return pricer.bound(layout, *parts, pricer.times(layout, *parts));
}

std::vector<PriceError> errors_of(const Case& c, size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  const Setting s(yaml(c.model, c.batch), c.world, 70e9, c.trainer);
  Pricer pricer = s.pricer();
  std::vector<Layout> all = candidates(s.given.config, s.spec, c.world, 8, {"none", "full"});
  std::shuffle(all.begin(), all.end(), random);
  std::vector<PriceError> out;
  for (const Layout& layout : all) {
    if (out.size() == count) break;
    const std::optional<Price> price = pricer.price(layout), exact = s.exact(layout);
    if (!exact || !price) continue;
    const std::optional<Price> bound = pricer.bound(layout);
    INFO(layout.name(c.world));
    CHECK(bound->memory == price->memory);
    CHECK(bound->seconds < 1.01 * price->seconds);
    const Price timed = timed_bound(pricer, layout);
    CHECK(timed.memory == price->memory);
    CHECK(timed.seconds <= price->seconds * (1 + 1e-12));
    CHECK(timed.seconds > bound->seconds * 0.99);
    out.push_back({layout.name(c.world), price->seconds / exact->seconds - 1,
                   price->memory / exact->memory - 1, exact->seconds});
  }
  return out;
}

double quantile(const std::vector<PriceError>& errors, double PriceError::*part, double share) {
  std::vector<double> sorted;
  for (const PriceError& e : errors) sorted.push_back(std::abs(e.*part));
  std::sort(sorted.begin(), sorted.end());
  return sorted[std::min(sorted.size() - 1, static_cast<size_t>(share * static_cast<double>(sorted.size())))];
}

}  // namespace

// The errors by layout: planner_tests "[errors]".
TEST_CASE("Errors of prices", "[.][errors]") {
  for (const Case& c : cases) {
    std::vector<PriceError> errors = errors_of(c, 75, 7);
    std::sort(errors.begin(), errors.end(), [](const PriceError& a, const PriceError& b) {
      return std::abs(a.seconds) > std::abs(b.seconds);
    });
    for (const PriceError& e : errors)
      std::printf("%7.2f %% %7.2f %%  %8.1f ms  %s\n", 100 * e.seconds, 100 * e.bytes, 1e3 * e.step,
                  e.layout.c_str());
    std::printf("seconds: median %.3f p90 %.3f, bytes: median %.3f p90 %.3f\n",
                quantile(errors, &PriceError::seconds, 0.5), quantile(errors, &PriceError::seconds, 0.9),
                quantile(errors, &PriceError::bytes, 0.5), quantile(errors, &PriceError::bytes, 0.9));
  }
}

TEST_CASE("Prices of random layouts are near their full estimates", "[price]") {
  std::vector<PriceError> errors;
  for (const Case& c : cases)
    for (const PriceError& e : errors_of(c, 40, 7)) errors.push_back(e);
  REQUIRE(errors.size() > 100);
  CHECK(quantile(errors, &PriceError::seconds, 0.5) < 0.005);
  CHECK(quantile(errors, &PriceError::seconds, 0.9) < 0.02);
  CHECK(quantile(errors, &PriceError::bytes, 0.5) < 0.02);
  CHECK(quantile(errors, &PriceError::bytes, 0.9) < 0.2);
}

TEST_CASE("Bounds from the times of stages have what Hopper's GEMMs lose beside operations", "[price]") {
  const Setting s(yaml(llama, 64), 8, 70e9);
  REQUIRE(s.device.model().major == 9);
  Pricer pricer = s.pricer();
  for (const Layout& layout :
       {Layout{.micro = 1, .recompute = "none", .strategy = "optim_grads"},
        Layout{
            .tp = 2, .micro = 1, .recompute = "none", .strategy = "optim_grads_params", .param_gather = true},
        Layout{.pp = 2, .micro = 1, .recompute = "none", .strategy = "optim_grads"},
        Layout{.pp = 2, .chunks = 2, .micro = 1, .recompute = "none", .strategy = "optim_grads"}}) {
    INFO(layout.name(s.world));
    const std::optional<Price> bound = pricer.bound(layout), price = pricer.price(layout),
                               exact = s.exact(layout);
    REQUIRE((bound && price && exact));
    const double timed = timed_bound(pricer, layout).seconds;
    CHECK(bound->seconds < 0.95 * price->seconds);
    CHECK(timed <= price->seconds * (1 + 1e-12));
    CHECK(timed * (1 - price->margin) <= exact->seconds);
    CHECK(timed > (layout.pp > 1 ? 0.97 : 1 - 1e-12) * price->seconds);
  }
}

TEST_CASE("Prices contain copies to and from the host", "[price]") {
  for (const char* key :
       {"offload_activations: true", "offload_activations: 0.5", "offload_optimizer: true"}) {
    std::string text = yaml(llama, 64);
    text.insert(text.find("  optimizer:"), fmt::format("  {}\n", key));
    const Setting s(text, 8, 70e9);
    Pricer pricer = s.pricer();
    for (const Layout& layout :
         {Layout{.micro = 1, .recompute = "none"}, Layout{.tp = 2, .micro = 2, .recompute = "none"},
          Layout{.pp = 2, .micro = 1, .recompute = "none"}}) {
      const std::optional<Price> price = pricer.price(layout), exact = s.exact(layout);
      INFO(key << ": " << layout.name(s.world));
      REQUIRE((price && exact));
      // Copies of the ends of stages have other passes beside them.
      CHECK(price->seconds == Approx(exact->seconds).epsilon(layout.pp > 1 ? 0.15 : 0.07));
    }
  }
}

TEST_CASE("Prices contain copies of weights in FP8, cached or for each GEMM", "[price]") {
  for (const char* recipe : {"tensorwise", "delayed"}) {
    std::string text = yaml(llama, 64);
    text.insert(text.find("  optimizer:"),
                fmt::format("  fp8_cfg: {{enabled: true, fp8_recipe: {}}}\n", recipe));
    const Setting s(text, 8, 70e9);
    Pricer pricer = s.pricer();
    for (const char* strategy : {"optim", "optim_grads_params"})
      for (Layout layout :
           {Layout{.micro = 1, .recompute = "none"}, Layout{.micro = 1, .recompute = "full"},
            Layout{.micro = 8, .recompute = "none"}, Layout{.tp = 2, .micro = 2, .recompute = "none"},
            Layout{.pp = 2, .micro = 1, .recompute = "none"}}) {
        layout.strategy = strategy;
        INFO(recipe << " " << layout.name(s.world));
        const std::optional<Price> price = pricer.price(layout), exact = s.exact(layout),
                                   bound = pricer.bound(layout);
        REQUIRE((price && exact && bound));
        CHECK(price->seconds == Approx(exact->seconds).epsilon(0.025));
        CHECK(price->memory == Approx(exact->memory).epsilon(0.04));
        CHECK(bound->seconds <= exact->seconds);
      }
  }
}

TEST_CASE("Prices contain the addition of gradients that are kept in bf16", "[price]") {
  std::string text = yaml(llama, 64);
  const std::string rate = "lr: 1.0e-4";
  text.replace(text.find(rate), rate.size(),
               rate + ", use_precision_aware_optimizer: true, main_grads_dtype: bf16");
  text += "distributed: {shard_strategy: optim}\n";
  const Setting s(text, 8, 70e9);
  Pricer pricer = s.pricer();
  for (const char* strategy : {"optim", "optim_grads"})
    for (Layout layout :
         {Layout{.micro = 1, .recompute = "none"}, Layout{.micro = 8, .recompute = "none"},
          Layout{.tp = 2, .micro = 1, .recompute = "none"}, Layout{.tp = 8, .micro = 4, .recompute = "none"},
          Layout{.pp = 2, .micro = 1, .recompute = "none"},
          Layout{.pp = 4, .schedule = "zb_h1", .micro = 2, .recompute = "none"}}) {
      layout.strategy = strategy;
      const std::optional<Price> price = pricer.price(layout), exact = s.exact(layout);
      INFO(layout.name(s.world) << " " << strategy);
      REQUIRE((price && exact));
      CHECK(price->seconds == Approx(exact->seconds).epsilon(layout.schedule == "zb_h1" ? 0.04 : 0.015));
      CHECK(price->memory == Approx(exact->memory).epsilon(0.02));
    }
}

TEST_CASE("Prices hold what recomputed layers keep for weight gradients that come later", "[price]") {
  const Setting s(yaml(llama, 64), 8, 70e9);
  Pricer pricer = s.pricer();
  for (const int stages : {2, 4, 8})
    for (const int64_t micro : {2, 4}) {
      Layout layout{.pp = stages, .schedule = "zb_h1", .micro = micro, .recompute = "full"};
      if (stages == 8) layout.strategy = "ddp";
      const std::optional<Price> price = pricer.price(layout), exact = s.exact(layout);
      INFO(layout.name(s.world));
      REQUIRE((price && exact));
      CHECK(price->memory == Approx(exact->memory).epsilon(0.1));
    }
}

namespace {

struct Best {
  size_t layouts = 0;  ///< estimated
  double step = HUGE_VAL;
  std::string name = {};
};

/// The best of all candidates by full estimates, and the search's, whose step it checks.
Best check_search(const Case& c, const std::vector<std::string>& recompute) {
  const Setting s(yaml(c.model, c.batch), c.world, 70e9);
  Best best;
  for (const Layout& layout : candidates(s.given.config, s.spec, c.world, 8, recompute)) {
    const std::optional<Price> exact = s.exact(layout);
    if (!exact) continue;
    ++best.layouts;
    if (exact->memory > s.capacity || exact->seconds >= best.step) continue;
    best.step = exact->seconds;
    best.name = layout.name(c.world);
  }
  const Result result =
      search_layouts({.config = s.file,
                      .overrides = {"cluster.gpus_per_node=" + std::to_string(std::min(8, c.world))},
                      .world = c.world,
                      .capacity = s.capacity,
                      .best = 8},
                     s.device);
  REQUIRE(!result.found.empty());
  INFO("best of all: " << best.name << ", found " << result.found.front().layout.name(c.world));
  CHECK(result.found.front().estimate.step <= best.step * 1.01);
  // Few are planned.
  CHECK(result.planned <= 60);
  if (c.world > 8)
    std::printf("%d ranks: best of %zu %.1f ms (%s), found %.1f ms (%s), %d planned, %d dry runs\n", c.world,
                best.layouts, 1e3 * best.step, best.name.c_str(), 1e3 * result.found.front().estimate.step,
                result.found.front().layout.name(c.world).c_str(), result.planned, result.dry_runs);
  return best;
}

}  // namespace

TEST_CASE("The search finds the best of all layouts", "[price]") {
  for (const Case& c : {Case{llama, 4, 16}, Case{uneven, 2, 8}, Case{gpt2, 4, 16}, Case{experts, 4, 8}})
    check_search(c, {"none"});
}

// Takes minutes: planner_tests "[exhaustive]".
TEST_CASE("The search finds the best of all layouts of many ranks", "[.][exhaustive]") {
  const std::string qwen =
      "model_type: qwen3, intermediate_size: 6144, num_hidden_layers: 12, num_key_value_heads: 8";
  const std::string mixtral =
      "model_type: mixtral, num_hidden_layers: 6, num_key_value_heads: 8, num_local_experts: 8, "
      "num_experts_per_tok: 2, intermediate_size: 7168";
  for (const Case& c : {Case{llama, 16, 64}, Case{uneven, 16, 32}, Case{gpt2, 32, 64}, Case{experts, 16, 32},
                        Case{mixtral, 32, 32}, Case{qwen, 64, 64}})
    check_search(c, {"none"});
}

TEST_CASE("Prices of thousands of ranks take few dry runs", "[price]") {
  const Setting s(yaml(llama, 16384), 8, 70e9);
  const Result result =
      search_layouts({.config = s.file,
                      .overrides = {"cluster.gpus_per_node=8", "policy.train_global_batch_size=16384"},
                      .world = 16384,
                      .capacity = 70e9,
                      .best = 4},
                     s.device);
  CHECK(result.tried > 1000);
  CHECK(result.dry_runs <= 400);
  CHECK(!result.found.empty());
}
