#pragma once
// Finds and reads the model of a configuration or of a model directory.

#include <optional>
#include <string>
#include <string_view>

#include "apps/model/spec/spec.h"
#include "apps/state/resume.h"
#include "core/config/load.h"

namespace nrl::train {

struct ModelCheck {
  std::optional<model::ModelSpec> spec;  ///< unset if there are problems
  Diagnostics problems;                  ///< at the keys of the configuration
};
/// The model of policy.model_name (config.json of a Hugging Face directory, overridden by policy.model) or of
/// policy.model alone. Problems that only follow from keys already reported (not sound()) are not repeated.
ModelCheck check_model(const ConfigResult& config);

/// The same for a configuration that passed check_model(); problems become an Error.
model::ModelSpec load_model_spec(const ConfigResult& config);

/// The model directory for `path`: `path` itself if it has a config.json or is an adapter, else the newest
/// valid step-N in it
/// (`note` then names it, and the newer ones that are damaged). Throws Error (`no_input`) with a remedy, also
/// for names on the Hugging Face Hub.
std::string find_model_directory(const std::string& path, std::string& note);

/// The model described by the config.json of a checkpoint or Hugging Face directory, or an adapter with the
/// base model that it names, of whose checksums, if it has any, this share is verified. Fails (65) if it is
/// damaged or not supported.
model::ModelSpec load_model_directory(const std::string& directory, VerifyShare share = verify_all);

/// Fails (65) if the model of a directory has no logits, which `command` needs.
void require_logits(const model::ModelSpec& spec, std::string_view command, const std::string& directory);

}  // namespace nrl::train
