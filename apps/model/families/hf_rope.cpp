#include "apps/model/families/hf_rope.h"

#include "core/io/json.h"

namespace nrl::model {

void write_rope(JsonValue& config, const ModelSpec& m) {
  static constexpr std::string_view names[] = {"default", "linear", "dynamic", "llama3", "yarn"};
  const JsonValue* given = nullptr;
  for (const char* key : {"rope_scaling", "rope_parameters"})  // like the reader, prefers the latter
    if (const JsonValue* value = config.find(key); value && value->is_object()) given = value;
  const std::string_view name = names[static_cast<int>(m.rope.kind)];
  JsonValue scaling = JsonValue::object({{"rope_type", name}});
  if (given)
    for (const JsonMember& member : given->members())
      if (member.key != "type" && member.key != "rope_type" && member.key != "rope_theta" &&
          member.key != "partial_rotary_factor")
        scaling.set(member.key, member.value);
  JsonValue parameters = scaling;
  parameters.set("rope_theta", m.rope.theta);
  if (m.rope.rotary_dim != m.head_dim) {
    const double partial = static_cast<double>(m.rope.rotary_dim) / static_cast<double>(m.head_dim);
    config.set("partial_rotary_factor", partial);
    parameters.set("partial_rotary_factor", partial);
  }
  config.set("rope_theta", m.rope.theta);
  config.set("rope_scaling", m.rope.kind == ops::RopeKind::standard ? JsonValue() : scaling);
  config.set("rope_parameters", parameters);
}

std::optional<ModelProblem> rope_conflict(const JsonValue& config) {
  const auto value = [](const JsonValue& object, std::string_view key) {
    const JsonValue* v = object.find(key);
    return v && !v->is_null() ? v : nullptr;
  };
  const auto differ = [](const JsonValue* a, const JsonValue* b) {
    if (!a || !b) return a != b;
    return a->is_number() && b->is_number() ? a->as_double() != b->as_double() : a->dump() != b->dump();
  };
  const auto conflict = [](const std::string& key, const JsonValue* now, const JsonValue* other) {
    return ModelProblem{
        key,
        fmt::format("{} {} differs from {} in rope_parameters. Fix: set both to one value, or only one", key,
                    now ? now->dump() : "not set", other ? other->dump() : "not set"),
        {key, "rope_parameters"}};
  };
  const JsonValue* parameters = value(config, "rope_parameters");
  if (!parameters || !parameters->is_object()) return std::nullopt;
  for (const char* key : {"rope_theta", "partial_rotary_factor"})
    if (const JsonValue* now = value(config, key), *other = value(*parameters, key);
        now && other && differ(now, other))
      return conflict(key, now, other);
  const JsonValue* given = config.find("rope_scaling");
  if (!given) return std::nullopt;
  if (!given->is_null() && !given->is_object())
    return ModelProblem{"rope_scaling", "rope_scaling must be an object or null", {"rope_scaling"}};
  const JsonValue scaling = given->is_object() ? *given : JsonValue::object();
  const JsonValue standard("default");
  const auto type = [&](const JsonValue& rope) {
    for (const char* key : {"rope_type", "type"})
      if (const JsonValue* v = value(rope, key)) return v;
    return &standard;
  };
  if (differ(type(scaling), type(*parameters)))
    return conflict("rope_scaling.rope_type", type(scaling), type(*parameters));
  if (!given->is_object()) return std::nullopt;
  for (const char* key :
       {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast",
        "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim"})
    if (const JsonValue* now = value(scaling, key), *other = value(*parameters, key); differ(now, other))
      return conflict(fmt::format("rope_scaling.{}", key), now, other);
  return std::nullopt;
}

}  // namespace nrl::model
