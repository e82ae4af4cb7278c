#include "apps/model/hf_rope.h"

#include "core/io/json.h"

namespace nrl::model {

void write_rope(JsonValue& config, const ModelSpec& m) {
  static constexpr std::string_view names[] = {"default", "linear", "dynamic", "llama3", "yarn"};
  const JsonValue* given = nullptr;
  for (const char* key : {"rope_scaling", "rope_parameters"})  // the reader prefers the latter too
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
  const auto object = [&](const char* key) {
    const JsonValue* value = config.find(key);
    return value && value->is_object() ? value : nullptr;
  };
  const JsonValue *parameters = object("rope_parameters"), *scaling = object("rope_scaling");
  if (!parameters) return std::nullopt;
  const auto conflict = [](const char* key, const std::string& old, const std::string& now) {
    return ModelProblem{
        key,
        fmt::format("{} {} and rope_parameters with {} differ. Fix: set both, or only one", key, old, now),
        {"rope_parameters"}};
  };
  const JsonValue* theta = config.find("rope_theta");
  if (theta && theta->is_number() &&
      theta->as_double() != parameters->get_double("rope_theta", theta->as_double()))
    return conflict("rope_theta", theta->dump(), parameters->at("rope_theta").dump());
  if (!scaling) return std::nullopt;
  const auto summary = [](const JsonValue& rope) {
    return fmt::format("{} x {}", rope.get_string("rope_type", rope.get_string("type", "default")),
                       rope.get_double("factor", 1.0));
  };
  if (summary(*scaling) != summary(*parameters))
    return conflict("rope_scaling", summary(*scaling), summary(*parameters));
  return std::nullopt;
}

}  // namespace nrl::model
