#pragma once
// Reads and writes Hugging Face's config.json.

#include <string>
#include <string_view>

#include "apps/model/families/config_problems.h"
#include "apps/model/spec/spec.h"

namespace nrl::model {

/// Parses the text of a config.json; `source` names it in messages. Throws ModelConfigError (exit 78) with
/// all problems for an unknown model_type, missing or invalid sizes, and unsupported features;
/// Error(Exit::data) for text that is not JSON.
ModelSpec parse_model_config(const std::string& json, const std::string& source);

/// `spec.config_json` completed for Hugging Face: architectures, model_type, all sizes,
/// torch_dtype and dtype. A scalar head is a ...ForSequenceClassification with one label. A model with a
/// router that transformers does not have gets the model_type nrl_FAMILY, which transformers refuses to load.
std::string hugging_face_config(const ModelSpec& spec, std::string_view dtype);

}  // namespace nrl::model
