#pragma once
// The rotary position keys of a config.json.

#include <optional>

#include "apps/model/config_problems.h"
#include "apps/model/spec.h"

namespace nrl {
class JsonValue;
}

namespace nrl::model {

/// Writes what transformers 4 reads (rope_theta, rope_scaling, partial_rotary_factor) and what transformers 5
/// reads (rope_parameters) into `config`, both saying the same. Keys of an existing rope_parameters or
/// rope_scaling are kept.
void write_rope(JsonValue& config, const ModelSpec& spec);

/// A problem where a config.json has both dialects and they differ: one of them would be ignored, for
/// instance an override of rope_theta beside the rope_parameters of a file. A rope_scaling of null means no
/// scaling.
std::optional<ModelProblem> rope_conflict(const JsonValue& config);

}  // namespace nrl::model
