#pragma once
// Adapters in files, as PEFT has them: a directory with adapter_config.json and adapter_model.safetensors,
// which has only A and B of every module, and the head of a reward model; the base model is in another
// directory.

#include <string>

#include "apps/model/spec/spec.h"
#include "core/config/config.h"

namespace nrl::train {

inline constexpr const char* adapter_config_name = "adapter_config.json";
/// The file of the tensors, without ".safetensors".
inline constexpr const char* adapter_stem = "adapter_model";

/// True if the directory holds an adapter, not a model.
bool is_adapter(const std::string& directory);

struct StoredAdapter {
  model::AdapterSpec spec;  ///< targets: the names of the modules in the file
  bool score = false;       ///< with the head of a reward model (modules_to_save)
  std::string base;         ///< base_model_name_or_path; empty: not named
};
/// Reads adapter_config.json, and the names and shapes of the tensors. Fails (65), naming what, if they do
/// not describe LoRA adapters that this program computes, or contradict each other; (66) if a file is
/// missing.
StoredAdapter read_adapter(const std::string& directory);

/// The directory of the adapter's base model. Fails (66) if there is none.
std::string base_directory(const std::string& directory, const StoredAdapter& adapter);

/// The adapter_config.json of a model with adapters (ModelSpec::trained). `base`: directory of its base
/// model; empty: none.
std::string adapter_config_json(const model::ModelSpec& spec, const std::string& base);

/// Reads policy.lora and policy.freeze.
model::TrainedPart trained_part(const PolicyConfig& policy);

/// Why the adapter in policy.lora.adapter is not one of this model and configuration; empty: it is.
std::string other_adapter(const std::string& directory, const model::ModelSpec& spec);

/// "adapters of rank 16 on 224 matrices: 2.4 M of 137 M parameters trained"; empty if everything is trained.
std::string trained_text(const model::ModelSpec& spec);

}  // namespace nrl::train
