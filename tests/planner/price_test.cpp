// Prices of layouts against their full estimates, and the search against all layouts.

#include "apps/planner/price.h"

#include <cmath>
#include <random>

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

/// A configuration in a file, its prices, and full estimates.
struct Setting {
  Setting(const std::string& text, int ranks, double bytes) : world(ranks), capacity(bytes) {
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
  /// Seconds and bytes; unset if refused.
  std::optional<Price> exact(const Layout& layout) const {
    const std::optional<Config> config = load(layout.overrides(), world);
    if (!config) return std::nullopt;
    predict::StagePlans plans = predict::plan_stages(*config, spec, world, device, capacity);
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
  predict::ModeledDevice device{machine::find_device_model("--device", "h100"), false, 1};
};

}  // namespace

TEST_CASE("Prices of random layouts are near their full estimates", "[price]") {
  std::mt19937 random(7);
  for (const auto& [model, world, batch] : {std::tuple(llama, 8, 64), std::tuple(uneven, 16, 128),
                                            std::tuple(gpt2, 4, 32), std::tuple(experts, 8, 64)}) {
    const Setting s(yaml(model, batch), world, 70e9);
    Pricer pricer(s.given.config, s.spec, world, s.nodes, s.device, s.capacity, 1,
                  [&](const std::vector<std::string>& keys, int ranks) { return s.load(keys, ranks); });
    std::vector<Layout> all = candidates(s.given.config, s.spec, world, 8, {"none", "full"});
    std::shuffle(all.begin(), all.end(), random);
    all.resize(std::min<size_t>(all.size(), 40));
    std::vector<double> seconds, bytes;
    for (const Layout& layout : all) {
      const std::optional<Price> price = pricer.price(layout), exact = s.exact(layout);
      if (!exact || !price) continue;
      INFO(layout.name(world));
      seconds.push_back(std::abs(std::log(price->seconds / exact->seconds)));
      bytes.push_back(std::abs(std::log(price->memory / exact->memory)));
      CHECK(seconds.back() < 0.6);
      // Layouts that fit must not be priced as too large.
      CHECK(price->memory < 1.3 * exact->memory);
    }
    REQUIRE(seconds.size() > 10);
    std::sort(seconds.begin(), seconds.end());
    std::sort(bytes.begin(), bytes.end());
    CHECK(seconds[seconds.size() / 2] < 0.06);
    CHECK(seconds[seconds.size() * 9 / 10] < 0.2);
    CHECK(bytes[bytes.size() / 2] < 0.25);
  }
}

TEST_CASE("The search finds the best of all layouts", "[price]") {
  for (const auto& [model, world, batch] : {std::tuple(llama, 8, 16), std::tuple(uneven, 8, 16),
                                            std::tuple(gpt2, 4, 32), std::tuple(experts, 4, 8)}) {
    const Setting s(yaml(model, batch), world, 70e9);
    double best = HUGE_VAL;
    std::string name;
    for (const Layout& layout : candidates(s.given.config, s.spec, world, 8, {"none"})) {
      const std::optional<Price> exact = s.exact(layout);
      if (!exact || exact->memory > s.capacity || exact->seconds >= best) continue;
      best = exact->seconds;
      name = layout.name(world);
    }
    const Result result =
        search_layouts({.config = s.file,
                        .overrides = {"cluster.gpus_per_node=" + std::to_string(std::min(8, world))},
                        .world = world,
                        .capacity = s.capacity,
                        .best = 8},
                       s.device);
    REQUIRE(!result.found.empty());
    INFO("best of all: " << name << ", found " << result.found.front().layout.name(world));
    CHECK(result.found.front().estimate.step <= best * 1.02);
  }
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
