#pragma once
// The RoPE keys of a config.json, and which layers have which of several rotary bases.

#include <optional>

#include "apps/model/families/config_problems.h"
#include "apps/model/spec/spec.h"

namespace nrl {
class JsonValue;
}

namespace nrl::model {

class ConfigProblems;
class ConfigReader;

/// Reads ModelSpec::ropes. A missing factor is refused: with a default the frequencies would differ from
/// those that the model was trained with.
void read_rope(const ConfigReader& r, ModelSpec& m, ConfigProblems& problems);
/// Reads which layers have `window` and the rotary base of windows: ModelSpec::layer_kinds, of as many
/// layers.
void read_layer_kinds(const ConfigReader& r, int64_t window, ModelSpec& m);

/// Writes the keys of transformers 4 (rope_theta, rope_scaling, partial_rotary_factor) and of transformers 5
/// (rope_parameters) into `config`, with the same values. Other keys of an existing rope_parameters or
/// rope_scaling are kept.
void write_rope(JsonValue& config, const ModelSpec& spec);

/// The same for a model with a sliding window and a rotary base of its own in some layers, whose types it
/// writes as well: rope_theta, rope_scaling and rope_local_base_freq; rope_parameters by type.
void write_layer_kinds(JsonValue& config, const ModelSpec& spec);

/// A problem if a config.json has the keys of both versions with different values: one of them would be
/// ignored, for instance an override of rope_theta if the file has rope_parameters. A rope_scaling of null
/// means no scaling.
std::optional<ModelProblem> rope_conflict(const JsonValue& config);

}  // namespace nrl::model
