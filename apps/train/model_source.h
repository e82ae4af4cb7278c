#pragma once
// Which model a configuration asks for, and where its tokenizer is.

#include <optional>
#include <string>

#include "apps/model/spec.h"
#include "core/config/load.h"

namespace nrl::train {

/// The model of `policy.model_name` (a Hugging Face directory's config.json with policy.model laid over it)
/// or of policy.model alone. What is wrong with it is an Error whose text shows the place in the user's file.
model::ModelSpec load_model_spec(const ConfigResult& config);

/// The model that a checkpoint's or Hugging Face directory's config.json describes. Exit::data when it is
/// none we have.
model::ModelSpec load_model_directory(const std::string& directory);

}  // namespace nrl::train
