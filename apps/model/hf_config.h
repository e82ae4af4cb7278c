#pragma once
// A model as Hugging Face describes it: config.json in and out.

#include <string>
#include <string_view>

#include "apps/model/config_problems.h"
#include "apps/model/spec.h"

namespace nrl::model {

/// Reads a config.json (text). `source` names it in messages. Refuses an unknown model_type, missing or
/// impossible sizes, and any key that changes the mathematics and is not built, naming key and value:
/// ModelConfigError (exit 78) with all problems, Error(Exit::data) for text that is not JSON.
ModelSpec parse_model_config(const std::string& json, const std::string& source);

/// `spec.config_json` completed for Hugging Face: architectures, model_type, every size, torch_dtype and
/// dtype.
std::string hugging_face_config(const ModelSpec& spec, std::string_view dtype);

}  // namespace nrl::model
