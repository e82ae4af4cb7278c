#include "apps/model/families/hf_rope.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "apps/model/families/config_reader.h"
#include "core/io/json.h"

namespace nrl::model {
namespace {

// Scaling of the rotary frequencies. A missing factor is refused: with a default the frequencies would differ
// from those that the model was trained with.
void read_rope_scaling(const ConfigReader& s, ops::RopeSpec& rope, int64_t max_positions,
                       const std::string& prefix) {
  static constexpr std::pair<std::string_view, ops::RopeKind> kinds[] = {{"default", ops::RopeKind::standard},
                                                                         {"linear", ops::RopeKind::linear},
                                                                         {"dynamic", ops::RopeKind::dynamic},
                                                                         {"llama3", ops::RopeKind::llama3},
                                                                         {"yarn", ops::RopeKind::yarn}};
  rope.kind = s.choice_or(kinds, "rope_type", ops::RopeKind::standard, "type");
  if (rope.kind == ops::RopeKind::standard && s.given("factor") && !s.given("rope_type", "type"))
    s.refuse("rope_type", "{}rope_type is missing: factor needs it", prefix);
  rope.factor = s.number_or("factor", 1.0);
  rope.low_freq_factor = s.number_or("low_freq_factor", 1.0);
  rope.high_freq_factor = s.number_or("high_freq_factor", 4.0);
  rope.beta_fast = s.positive_or("beta_fast", 32.0);
  rope.beta_slow = s.positive_or("beta_slow", 1.0);
  rope.attention_factor = s.given("attention_factor") ? s.positive_or("attention_factor", 1.0) : 0.0;
  rope.truncate = s.flag_or("truncate", true);
  // Dynamic scaling always starts from max_position_embeddings; transformers permits the key as well.
  const int64_t original = s.size_or("original_max_position_embeddings", max_positions);
  if (rope.kind != ops::RopeKind::dynamic) rope.original_max_position = original;
  const bool llama3 = rope.kind == ops::RopeKind::llama3;
  const std::string_view kind = llama3 ? "rope_type llama3" : "RoPE scaling";
  if (rope.kind != ops::RopeKind::standard) s.required("factor", kind);
  if (llama3) {
    for (const char* key : {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
      s.required(key, kind);
  }
  if (rope.kind != ops::RopeKind::standard && s.valid({prefix + "factor"}) && rope.factor < 1)
    s.refuse("factor", "{}factor must be at least 1, found {}", prefix, rope.factor);
  // Both together replace the attention factor derived from `factor`; one alone has no effect.
  const double mscale = s.number_or("mscale", 0), mscale_all_dim = s.number_or("mscale_all_dim", 0);
  if (rope.kind == ops::RopeKind::yarn && rope.attention_factor == 0 && mscale > 0 && mscale_all_dim > 0) {
    const double log_factor = 0.1 * std::log(std::max(rope.factor, 1.0));
    rope.attention_factor = (mscale * log_factor + 1) / (mscale_all_dim * log_factor + 1);
  }
  if (llama3 && s.valid({prefix + "low_freq_factor", prefix + "high_freq_factor"}) &&
      rope.high_freq_factor <= rope.low_freq_factor)
    s.conflict("high_freq_factor", {prefix + "low_freq_factor"},
               "{}high_freq_factor {} must be greater than low_freq_factor {}", prefix, rope.high_freq_factor,
               rope.low_freq_factor);
  const bool yarn = rope.kind == ops::RopeKind::yarn;
  if (!llama3) s.note_unused({"low_freq_factor", "high_freq_factor"});
  if (rope.kind == ops::RopeKind::standard || rope.kind == ops::RopeKind::linear)
    s.note_unused({"original_max_position_embeddings"});
  if (!yarn) s.note_unused({"beta_fast", "beta_slow", "attention_factor", "truncate"});
  if (!yarn || mscale == 0 || mscale_all_dim == 0) s.note_unused({"mscale", "mscale_all_dim"});
  if (rope.kind == ops::RopeKind::standard) s.note_unused({"factor"});
}

/// The keys of a type of layers: in rope_parameters of transformers 5, and at the top level of
/// transformers 4.
struct RopeKeys {
  std::string_view type, theta;
  std::string_view scaling;  ///< of transformers 4; empty: none
};
constexpr RopeKeys of_full_layers{"full_attention", "rope_theta", "rope_scaling"},
    of_sliding_layers{"sliding_attention", "rope_local_base_freq", ""};

// Reads ropes[0] of layers without a window and ropes[1] of the others (WindowRule::by_layer).
void read_ropes_by_layer(const ConfigReader& r, ModelSpec& m, ConfigProblems& problems) {
  const FamilyRules& rules = rules_of(m.family);
  m.ropes.clear();
  const JsonValue* const parameters = r.given("rope_parameters");
  if (parameters && !parameters->is_object())
    r.refuse("rope_parameters", "rope_parameters must be an object, found {}", parameters->kind());
  for (const RopeKeys& keys : {of_full_layers, of_sliding_layers}) {
    ops::RopeSpec rope{.rotary_dim = m.head_dim, .original_max_position = m.max_positions};
    std::string theta_key(keys.theta), prefix(keys.scaling);
    rope.theta = r.number_or(keys.theta, keys.scaling.empty() ? rules.local_rope_theta : rules.rope_theta);
    const JsonValue* scaling = keys.scaling.empty() ? nullptr : r.given(keys.scaling);
    if (parameters && parameters->is_object()) {
      const ConfigReader types(*parameters, problems, "rope_parameters.");
      prefix = fmt::format("rope_parameters.{}", keys.type);
      if (const JsonValue* own = types.given(keys.type)) scaling = own;
      if (parameters->find("rope_type") || parameters->find("rope_theta"))
        r.refuse("rope_parameters",
                 "rope_parameters must have the objects full_attention and sliding_attention in this "
                 "model_type, each with its rope_type and rope_theta");
    }
    if (scaling && !scaling->is_object()) {
      r.refuse(prefix, "{} must be an object, found {}", prefix, scaling->kind());
    } else if (scaling) {
      prefix += ".";
      const ConfigReader s(*scaling, problems, prefix);
      read_rope_scaling(s, rope, m.max_positions, prefix);
      if (s.given("rope_theta")) theta_key = prefix + "rope_theta";
      rope.theta = s.number_or("rope_theta", rope.theta);
    }
    if (rope.theta <= 1 && problems.valid({theta_key}))
      r.refuse(theta_key, "{} must be greater than 1, found {}", theta_key, rope.theta);
    m.ropes.push_back(rope);
  }
  if (m.head_dim % 2 != 0 && problems.valid({"head_dim"}))
    r.refuse("head_dim", "head_dim {} is odd: RoPE rotates pairs", m.head_dim);
}

}  // namespace

void read_rope(const ConfigReader& r, ModelSpec& m, ConfigProblems& problems) {
  if (rules_of(m.family).window == WindowRule::by_layer) return read_ropes_by_layer(r, m, problems);
  ops::RopeSpec& rope = m.ropes.front();
  // Transformers v5 keeps everything in rope_parameters; v4 has rope_theta and rope_scaling.
  const std::string scaling_key = r.given("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const JsonValue* scaling = r.given(scaling_key);
  rope.theta = r.number_or("rope_theta", rules_of(m.family).rope_theta);
  double partial = r.number_or("partial_rotary_factor", 1.0);
  rope.original_max_position = m.max_positions;
  std::string theta_key = "rope_theta", partial_key = "partial_rotary_factor";
  if (scaling && !scaling->is_object()) {
    r.refuse(scaling_key, "{} must be an object, found {}", scaling_key, scaling->kind());
  } else if (scaling) {
    const std::string prefix = scaling_key + ".";
    const ConfigReader s(*scaling, problems, prefix);
    for (const JsonMember& member : scaling->members())
      if (member.value.is_object())
        s.refuse(member.key, "{}{}: RoPE parameters per layer type are not supported", prefix, member.key);
    read_rope_scaling(s, rope, m.max_positions, prefix);
    // At the top level transformers 5 prefers this key, and transformers 4 ignores it.
    constexpr std::string_view original_key = "original_max_position_embeddings";
    const bool uses_original = rope.kind == ops::RopeKind::llama3 || rope.kind == ops::RopeKind::yarn;
    if (uses_original && s.valid({prefix + std::string(original_key)}) &&
        r.size_or(original_key, rope.original_max_position) != rope.original_max_position)
      r.refuse(original_key, "{} is {}, but {} in {}. Fix: set it only in {}", original_key,
               r.find(original_key)->dump(), rope.original_max_position, scaling_key, scaling_key);
    if (s.given("rope_theta")) theta_key = prefix + theta_key;
    if (s.given("partial_rotary_factor")) partial_key = prefix + partial_key;
    rope.theta = s.number_or("rope_theta", rope.theta);
    partial = s.number_or("partial_rotary_factor", partial);
  }
  if (rope.theta <= 1 && problems.valid({theta_key}))
    r.refuse(theta_key, "{} must be greater than 1, found {}", theta_key, rope.theta);
  const double rotary = static_cast<double>(m.head_dim) * partial;
  rope.rotary_dim = rotary < 1e9 ? static_cast<int64_t>(std::llround(rotary)) : 0;
  if (rope.rotary_dim >= 2 && rope.rotary_dim % 2 == 0 && rope.rotary_dim <= m.head_dim) return;
  std::vector<std::string> depends{partial_key, "hidden_size", "num_attention_heads"};
  if (problems.valid({partial_key, "head_dim", "hidden_size", "num_attention_heads"}))
    r.conflict(
        r.given("head_dim") ? "head_dim" : "hidden_size", std::move(depends),
        "head_dim {} x partial_rotary_factor {} gives {} rotary dimensions; expected an even number of "
        "at most head_dim",
        m.head_dim, partial, rope.rotary_dim);
}

// Which layers have the sliding window, and its rotary base.
void read_layer_kinds(const ConfigReader& r, int64_t window, ModelSpec& m) {
  constexpr int64_t pattern = 6;  // default of transformers: the last of six layers has no window
  const int64_t period = r.size_or("sliding_window_pattern", pattern);
  const JsonValue* types = r.given("layer_types");
  bool valid = !types || (types->is_array() && static_cast<int64_t>(types->items().size()) == m.layers);
  for (int64_t i = 0; valid && i < m.layers; ++i) {
    bool slides = (i + 1) % period != 0;
    if (types) {
      const JsonValue& type = types->items()[static_cast<size_t>(i)];
      slides = type.is_string() && type.as_string() == of_sliding_layers.type;
      valid = slides || (type.is_string() && type.as_string() == of_full_layers.type);
    }
    m.layer_kinds[i] = {.window = slides ? window : 0, .rope = slides ? size_t{1} : 0};
  }
  if (!valid && r.valid({"num_hidden_layers"}))
    r.refuse("layer_types",
             "layer_types must be full_attention or sliding_attention for each of the {} layers", m.layers);
}

namespace {

/// rope_type and the other keys of `given` but its base.
JsonValue scaling_of(const ops::RopeSpec& rope, const JsonValue* given) {
  static constexpr std::string_view names[] = {"default", "linear", "dynamic", "llama3", "yarn"};
  JsonValue scaling = JsonValue::object({{"rope_type", names[static_cast<int>(rope.kind)]}});
  if (given)
    for (const JsonMember& member : given->members())
      if (member.key != "type" && member.key != "rope_type" && member.key != "rope_theta" &&
          member.key != "partial_rotary_factor")
        scaling.set(member.key, member.value);
  return scaling;
}

const JsonValue* object_in(const JsonValue* json, std::string_view key) {
  const JsonValue* value = json ? json->find(key) : nullptr;
  return value && value->is_object() ? value : nullptr;
}

}  // namespace

void write_rope(JsonValue& config, const ModelSpec& m) {
  const ops::RopeSpec& rope = m.ropes.front();
  const JsonValue* given = object_in(&config, "rope_parameters");  // preferred by the reader, too
  if (!given) given = object_in(&config, "rope_scaling");
  const JsonValue scaling = scaling_of(rope, given);
  JsonValue parameters = scaling;
  parameters.set("rope_theta", rope.theta);
  if (rope.rotary_dim != m.head_dim) {
    const double partial = static_cast<double>(rope.rotary_dim) / static_cast<double>(m.head_dim);
    config.set("partial_rotary_factor", partial);
    parameters.set("partial_rotary_factor", partial);
  }
  config.set("rope_theta", rope.theta);
  config.set("rope_scaling", rope.kind == ops::RopeKind::standard ? JsonValue() : scaling);
  config.set("rope_parameters", parameters);
}

void write_layer_kinds(JsonValue& config, const ModelSpec& m) {
  const JsonValue* const given = object_in(&config, "rope_parameters");
  const JsonValue* const full =
      given ? object_in(given, "full_attention") : object_in(&config, "rope_scaling");
  JsonValue scaling = scaling_of(m.ropes[0], full),
            local = scaling_of(m.ropes[1], object_in(given, "sliding_attention"));
  config.set("rope_theta", m.ropes[0].theta);
  config.set("rope_scaling", m.ropes[0].kind == ops::RopeKind::standard ? JsonValue() : scaling);
  config.set("rope_local_base_freq", m.ropes[1].theta);
  scaling.set("rope_theta", m.ropes[0].theta);
  local.set("rope_theta", m.ropes[1].theta);
  config.set("rope_parameters",
             JsonValue::object({{"full_attention", scaling}, {"sliding_attention", local}}));
  std::vector<std::string_view> types;
  for (const LayerKind& kind : m.layer_kinds)
    types.emplace_back(kind.rope == 0 ? "full_attention" : "sliding_attention");
  config.set("layer_types", types);
}

namespace {

/// rope_conflict() with RoPE parameters by type of layer: the older keys beside them are of one type each.
std::optional<ModelProblem> conflict_by_layer(const JsonValue& config, const JsonValue& parameters) {
  JsonValue full = JsonValue::object();
  for (const char* key : {"rope_theta", "rope_scaling"})
    if (const JsonValue* value = config.find(key)) full.set(key, *value);
  if (const JsonValue* own = object_in(&parameters, "full_attention")) full.set("rope_parameters", *own);
  if (auto conflict = rope_conflict(full)) return conflict;
  const char* const key = "rope_local_base_freq";
  const JsonValue *theta = config.find(key), *sliding = object_in(&parameters, "sliding_attention");
  const JsonValue* const other = sliding ? sliding->find("rope_theta") : nullptr;
  if (!theta || !other || !theta->is_number() || !other->is_number() ||
      theta->as_double() == other->as_double())
    return std::nullopt;
  return ModelProblem{
      key,
      fmt::format("{} {} differs from rope_theta {} in rope_parameters.sliding_attention. Fix: "
                  "set both to one value, or only one",
                  key, theta->dump(), other->dump()),
      {key, "rope_parameters"}};
}

}  // namespace

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
  if (parameters->find("full_attention") || parameters->find("sliding_attention"))
    return conflict_by_layer(config, *parameters);
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
