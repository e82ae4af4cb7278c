#pragma once
// Runs whose steps are estimated.

#include <string>
#include <vector>

#include "apps/machine/device_models.h"
#include "apps/state/model_source.h"
#include "core/config/load.h"
#include "tests/catch.h"

namespace nrl::test {

inline constexpr const char* llama =
    "{model_type: llama, vocab_size: 32000, hidden_size: 2048, intermediate_size: 5632, num_hidden_layers: "
    "8, "
    "num_attention_heads: 16, num_key_value_heads: 8, max_position_embeddings: 8192}";

inline std::string yaml_of(const std::string& model) {
  return "policy:\n  model: " + model +
         "\n  train_global_batch_size: 32\n  max_total_sequence_length: 2048\n  optimizer: {lr: 1.0e-4}\n"
         "pretrain: {max_num_steps: 4}\ndata: {train: {data_path: none}}\ndevice: cuda\n";
}

inline ConfigResult configured(int world, std::vector<std::string> overrides,
                               const std::string& model = llama) {
  overrides.emplace_back("policy.recompute.granularity=none");
  ConfigResult config = load_config_text(yaml_of(model), "model.yaml", overrides);
  INFO(render(config.diagnostics));
  REQUIRE(config.ok());
  REQUIRE(validate_for_world(config, world).empty());
  return config;
}

inline const machine::DeviceModel& h100() {
  return machine::find_device_model("--device", "h100");
}

}  // namespace nrl::test
