#pragma once
// Engines of tiny models with batches made by hand.

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/state/model_source.h"
#include "apps/train/start/initial_state.h"
#include "apps/train/start/placement.h"
#include "core/base/philox.h"
#include "core/ops/transfer.h"
#include "tests/catch.h"

namespace nrl::test {

constexpr int64_t T = 8;  ///< tokens of a sequence

inline constexpr const char* tiny_llama =
    "{model_type: llama, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2,\n"
    "          num_attention_heads: 2, max_position_embeddings: 64}";

/// A configuration that may have problems.
inline ConfigResult load_tiny(const std::string& device, const std::vector<std::string>& overrides,
                              const std::string& model) {
  std::vector<std::string> all{"device=" + device};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return load_config_text("policy:\n  model: " + model +
                              "\n  train_global_batch_size: 4\n"
                              "  train_micro_batch_size: 2\n"
                              "  max_total_sequence_length: 8\n"
                              "pretrain: {max_num_steps: 4, seed: 7}\n"
                              "data: {train: {data_path: none}}\n"
                              "kernels: {num_threads: 1}\n",
                          "tiny.yaml", all);
}

inline ConfigResult tiny_config(const std::string& device, const std::vector<std::string>& overrides = {},
                                const std::string& model = tiny_llama) {
  ConfigResult result = load_tiny(device, overrides, model);
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  return result;
}

inline data::HostMicroBatch random_batch(int64_t tokens, uint64_t seed) {
  const PhiloxStream random(seed, "batch");
  data::HostMicroBatch batch;
  for (int64_t i = 0; i < tokens; ++i) {
    batch.tokens.push_back(static_cast<int32_t>(random.bits(static_cast<uint64_t>(2 * i)) % 61));
    batch.targets.push_back(static_cast<int32_t>(random.bits(static_cast<uint64_t>(2 * i + 1)) % 61));
  }
  return batch;
}

/// A new engine with the initial weights of the configuration.
inline std::unique_ptr<engine::Engine> make_engine(
    train::Placement& placement, const ConfigResult& result,
    std::optional<engine::TrainingOptions> options = std::nullopt,
    std::optional<model::LossNeeds> loss = {}) {
  const Config& c = result.config;
  const plan::GridPosition position = placement.grid_position();
  auto plan = plan::make_run_plan(c, train::load_model_spec(result), resolve_batch(c, position.ranks()),
                                  position, placement.device(), 1, std::move(loss));
  auto engine =
      std::make_unique<engine::Engine>(std::move(plan), options ? *options : engine::training_options(c),
                                       placement.groups(), placement.exec());
  monitor::StartPhases phases;
  train::load_initial_weights(c, *engine, train::verify_none, 1, phases);
  return engine;
}

/// `on_host`: the tensor is offloaded.
inline std::vector<char> bytes_of(engine::Engine& engine, const Tensor& tensor, bool on_host = false) {
  std::vector<char> bytes(static_cast<size_t>(tensor.bytes()));
  if (on_host) {
    ops::synchronize(engine.exec());
    std::memcpy(bytes.data(), tensor.data, bytes.size());
    return bytes;
  }
  ops::download(engine.exec(), tensor, bytes.data());
  return bytes;
}

}  // namespace nrl::test
