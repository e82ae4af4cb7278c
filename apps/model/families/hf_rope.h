#pragma once
// The RoPE keys of a config.json.

#include <optional>

#include "apps/model/families/config_problems.h"
#include "apps/model/spec/spec.h"

namespace nrl {
class JsonValue;
}

namespace nrl::model {

/// Writes the keys of transformers 4 (rope_theta, rope_scaling, partial_rotary_factor) and of transformers 5
/// (rope_parameters) into `config`, with the same values. Other keys of an existing rope_parameters or
/// rope_scaling are kept.
void write_rope(JsonValue& config, const ModelSpec& spec);

/// A problem if a config.json has the keys of both versions with different values: one of them would be
/// ignored, for instance an override of rope_theta if the file has rope_parameters. A rope_scaling of null
/// means no scaling.
std::optional<ModelProblem> rope_conflict(const JsonValue& config);

}  // namespace nrl::model
