#pragma once
// Which model a configuration asks for, and the directories that models are read from.

#include <optional>
#include <string>

#include "apps/model/spec.h"
#include "core/config/load.h"

namespace nrl::train {

struct ModelCheck {
  std::optional<model::ModelSpec> spec;  ///< nothing where there are problems
  Diagnostics problems;                  ///< all of them, at the keys of the configuration
};
/// The model of `policy.model_name` (a Hugging Face directory's config.json with policy.model laid over it)
/// or of policy.model alone. Keys that are not sound are left out of account.
ModelCheck check_model(const ConfigResult& config);

/// The same for a configuration that was checked; what is wrong nevertheless is an Error.
model::ModelSpec load_model_spec(const ConfigResult& config);

/// The model directory that a user means by `path`: itself when it holds a config.json, or the newest valid
/// step-N of a checkpoint directory (`note` then says which, and which newer ones were passed over). Throws
/// Error (`no_input`) with what to do, for names on the Hugging Face Hub too.
std::string find_model_directory(const std::string& path, std::string& note);

/// The model that a checkpoint's or Hugging Face directory's config.json describes. Exit::data when it is
/// none we have.
model::ModelSpec load_model_directory(const std::string& directory);

}  // namespace nrl::train
