#include "apps/model/hf_config.h"

#include <algorithm>
#include <cmath>

#include "apps/model/config_reader.h"
#include "apps/model/hf_rope.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/json.h"
#include "core/ops/attention.h"
#include "core/ops/linear.h"

namespace nrl::model {
namespace {

constexpr std::pair<std::string_view, ops::Activation> activations[] = {
    {"silu", ops::Activation::silu},           {"swish", ops::Activation::silu},
    {"gelu", ops::Activation::gelu_erf},       {"gelu_new", ops::Activation::gelu_tanh},
    {"gelu_fast", ops::Activation::gelu_tanh}, {"gelu_pytorch_tanh", ops::Activation::gelu_tanh}};

// Scaling of the rotary frequencies. A missing factor is refused: with a default the frequencies would differ
// from those that the model was trained with.
void read_rope_scaling(const ConfigReader& s, ModelSpec& m, const std::string& prefix) {
  static constexpr std::pair<std::string_view, ops::RopeKind> kinds[] = {{"default", ops::RopeKind::standard},
                                                                         {"linear", ops::RopeKind::linear},
                                                                         {"dynamic", ops::RopeKind::dynamic},
                                                                         {"llama3", ops::RopeKind::llama3},
                                                                         {"yarn", ops::RopeKind::yarn}};
  m.rope.kind = s.choice_or(kinds, "rope_type", ops::RopeKind::standard, "type");
  if (m.rope.kind == ops::RopeKind::standard && s.given("factor") && !s.given("rope_type", "type"))
    s.refuse("rope_type", "{}rope_type is missing: factor needs it", prefix);
  m.rope.factor = s.number_or("factor", 1.0);
  m.rope.low_freq_factor = s.number_or("low_freq_factor", 1.0);
  m.rope.high_freq_factor = s.number_or("high_freq_factor", 4.0);
  m.rope.beta_fast = s.positive_or("beta_fast", 32.0);
  m.rope.beta_slow = s.positive_or("beta_slow", 1.0);
  m.rope.attention_factor = s.given("attention_factor") ? s.positive_or("attention_factor", 1.0) : 0.0;
  m.rope.truncate = s.flag_or("truncate", true);
  // Dynamic scaling always starts from max_position_embeddings.
  const int64_t original = s.size_or("original_max_position_embeddings", m.max_positions);
  if (m.rope.kind != ops::RopeKind::dynamic) m.rope.original_max_position = original;
  const bool llama3 = m.rope.kind == ops::RopeKind::llama3;
  const std::string_view kind = llama3 ? "rope_type llama3" : "RoPE scaling";
  if (m.rope.kind != ops::RopeKind::standard) s.required("factor", kind);
  if (llama3) {
    for (const char* key : {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
      s.required(key, kind);
  }
  if (m.rope.kind != ops::RopeKind::standard && s.valid({prefix + "factor"}) && m.rope.factor < 1)
    s.refuse("factor", "{}factor must be at least 1, found {}", prefix, m.rope.factor);
  // Both together replace the attention factor derived from `factor`; one alone has no effect.
  const double mscale = s.number_or("mscale", 0), mscale_all_dim = s.number_or("mscale_all_dim", 0);
  if (m.rope.kind == ops::RopeKind::yarn && m.rope.attention_factor == 0 && mscale > 0 &&
      mscale_all_dim > 0) {
    const double log_factor = 0.1 * std::log(std::max(m.rope.factor, 1.0));
    m.rope.attention_factor = (mscale * log_factor + 1) / (mscale_all_dim * log_factor + 1);
  }
  if (llama3 && s.valid({prefix + "low_freq_factor", prefix + "high_freq_factor"}) &&
      m.rope.high_freq_factor <= m.rope.low_freq_factor)
    s.conflict("high_freq_factor", {prefix + "low_freq_factor"},
               "{}high_freq_factor {} must be greater than low_freq_factor {}", prefix,
               m.rope.high_freq_factor, m.rope.low_freq_factor);
}

void read_rope(const ConfigReader& r, ModelSpec& m, ConfigProblems& problems) {
  // Transformers v5 keeps everything in rope_parameters; v4 has rope_theta and rope_scaling.
  const std::string scaling_key = r.given("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const JsonValue* scaling = r.given(scaling_key);
  m.rope.theta = r.number_or("rope_theta", 10000.0);
  double partial = r.number_or("partial_rotary_factor", 1.0);
  m.rope.original_max_position = m.max_positions;
  std::string theta_key = "rope_theta", partial_key = "partial_rotary_factor";
  if (scaling && !scaling->is_object()) {
    r.refuse(scaling_key, "{} must be an object, found {}", scaling_key, scaling->kind());
  } else if (scaling) {
    const std::string prefix = scaling_key + ".";
    const ConfigReader s(*scaling, problems, prefix);
    for (const JsonMember& member : scaling->members())
      if (member.value.is_object())
        s.refuse(member.key, "{}{}: RoPE parameters per layer type are not supported", prefix, member.key);
    read_rope_scaling(s, m, prefix);
    // At the top level transformers 5 prefers this key, and transformers 4 ignores it.
    constexpr std::string_view original_key = "original_max_position_embeddings";
    const bool uses_original = m.rope.kind == ops::RopeKind::llama3 || m.rope.kind == ops::RopeKind::yarn;
    if (uses_original && s.valid({prefix + std::string(original_key)}) &&
        r.size_or(original_key, m.rope.original_max_position) != m.rope.original_max_position)
      r.refuse(original_key, "{} is {}, but {} in {}. Fix: set it only in {}", original_key,
               r.find(original_key)->dump(), m.rope.original_max_position, scaling_key, scaling_key);
    if (s.given("rope_theta")) theta_key = prefix + theta_key;
    if (s.given("partial_rotary_factor")) partial_key = prefix + partial_key;
    m.rope.theta = s.number_or("rope_theta", m.rope.theta);
    partial = s.number_or("partial_rotary_factor", partial);
  }
  if (m.rope.theta <= 1 && problems.valid({theta_key}))
    r.refuse(theta_key, "{} must be greater than 1, found {}", theta_key, m.rope.theta);
  const double rotary = static_cast<double>(m.head_dim) * partial;
  m.rope.rotary_dim = rotary < 1e9 ? static_cast<int64_t>(std::llround(rotary)) : 0;
  if (m.rope.rotary_dim >= 2 && m.rope.rotary_dim % 2 == 0 && m.rope.rotary_dim <= m.head_dim) return;
  std::vector<std::string> depends{partial_key, "hidden_size", "num_attention_heads"};
  if (problems.valid({partial_key, "head_dim", "hidden_size", "num_attention_heads"}))
    r.conflict(
        r.given("head_dim") ? "head_dim" : "hidden_size", std::move(depends),
        "head_dim {} x partial_rotary_factor {} gives {} rotary dimensions; expected an even number of "
        "at most head_dim",
        m.head_dim, partial, m.rope.rotary_dim);
}

void read_gpt2(const ConfigReader& r, ModelSpec& m) {
  m.hidden = r.size("n_embd", "hidden_size");
  m.layers = r.size("n_layer", "num_hidden_layers");
  m.heads = m.kv_heads = r.size("n_head", "num_attention_heads");
  m.max_positions = r.size_or("n_positions", 1024, "max_position_embeddings");
  // Only in older files; transformers ignores it.
  if (const JsonValue* n_ctx = r.find("n_ctx"))
    if (n_ctx->is_number() && n_ctx->as_double() == static_cast<double>(m.max_positions))
      r.note_read({"n_ctx"});
  m.ffn = r.size_or("n_inner", 4 * m.hidden);
  m.activation = r.choice_or(activations, "activation_function", ops::Activation::gelu_tanh);
  m.norm = ops::NormKind::layer;
  m.norm_eps = static_cast<float>(r.positive_or("layer_norm_epsilon", 1e-5));
  m.norm_bias = m.qkv_bias = m.o_bias = m.mlp_bias = m.learned_positions = true;
  m.gated = m.use_rope = false;
  m.tied = r.flag_or("tie_word_embeddings", true);
  m.residual_dropout = r.dropout_or("resid_pdrop", 0.1);
  m.embedding_dropout = r.dropout_or("embd_pdrop", 0.1);
  m.attention_dropout = r.dropout_or("attn_pdrop", 0.1);
  r.must_be_on("scale_attn_weights", "attention without scaling by 1/sqrt(head_dim)");
  r.must_be_off("scale_attn_by_inverse_layer_idx", "scaling attention by the layer index");
  r.must_be_off("reorder_and_upcast_attn", "reordered and upcast attention");
  r.must_be_off("add_cross_attention", "cross attention");
}

// The sliding window. Mistral: in all layers. Qwen: with use_sliding_window, in layers >= max_window_layers.
void read_window(const ConfigReader& r, ModelSpec& m) {
  constexpr int64_t missing = 4096;  // default of transformers for a missing key; null means no window
  const bool null = r.find("sliding_window") && !r.given("sliding_window");
  if (m.family == Family::mistral && !null) m.window = r.size_or("sliding_window", missing);
  const bool qwen = m.family == Family::qwen2 || m.family == Family::qwen3;
  if (qwen) r.note_read({"sliding_window", "max_window_layers"});  // both depend on use_sliding_window
  if (qwen && !null && r.flag_or("use_sliding_window", false) &&
      r.size_or("max_window_layers", 28) < m.layers && r.valid({"max_window_layers", "num_hidden_layers"}))
    r.conflict("max_window_layers", {"num_hidden_layers"},
               "max_window_layers: a sliding window in only some layers is not supported");
  const std::string_view kind = m.window > 0 ? "sliding_attention" : "full_attention";
  const JsonValue* types = r.given("layer_types");
  if (!types || !r.valid({"num_hidden_layers"})) return;
  bool as_expected = types->is_array() && static_cast<int64_t>(types->items().size()) == m.layers;
  if (as_expected)
    for (const JsonValue& type : types->items()) as_expected &= type.is_string() && type.as_string() == kind;
  if (!as_expected)
    r.refuse("layer_types",
             "layer_types must be {} for each of the {} layers; other or mixed layer types are not supported",
             kind, m.layers);
}

void read_llama_like(const ConfigReader& r, ModelSpec& m) {
  m.hidden = r.size("hidden_size");
  m.layers = r.size("num_hidden_layers");
  m.heads = r.size("num_attention_heads");
  m.kv_heads = r.size_or("num_key_value_heads", m.heads);
  m.ffn = r.size("intermediate_size");
  const int64_t longest = m.family == Family::llama ? 2048 : m.family == Family::mistral ? 131072 : 32768;
  m.max_positions = r.size_or("max_position_embeddings", longest);
  m.head_dim = r.size_or("head_dim", m.family == Family::qwen3 ? 128 : 0);
  m.activation = r.choice_or(activations, "hidden_act", m.activation);
  m.norm_eps = static_cast<float>(r.positive_or("rms_norm_eps", 1e-6));
  const bool attention_bias = r.flag_or("attention_bias", false);
  m.qkv_bias = m.family == Family::qwen2 || attention_bias;
  m.o_bias = m.family != Family::qwen2 && attention_bias;
  // transformers has no such biases in these families and would not read them.
  if (m.family != Family::llama) r.must_be_off("mlp_bias", "an MLP bias in this model_type");
  if (m.family == Family::mistral) r.must_be_off("attention_bias", "an attention bias in this model_type");
  m.mlp_bias = r.flag_or("mlp_bias", false);
  m.qk_norm = m.family == Family::qwen3;
  m.tied = r.flag_or("tie_word_embeddings", false);
  m.attention_dropout = r.dropout_or("attention_dropout", 0.0);
  read_window(r, m);
  r.must_be_off("num_local_experts", "a mixture of experts");
  r.must_be_off("num_experts", "a mixture of experts");
}

// Constraints between head counts and widths.
void check_heads(const ConfigReader& r, ModelSpec& m) {
  const bool gpt2 = m.family == Family::gpt2 && r.given("n_head");
  const std::string hidden_key = gpt2 ? "n_embd" : "hidden_size",
                    heads_key = gpt2 ? "n_head" : "num_attention_heads";
  if (m.head_dim == 0) {
    if (m.hidden % m.heads && r.valid({hidden_key, heads_key}))
      r.conflict(heads_key, {hidden_key}, "{} {} is not divisible by {} {}{}", hidden_key, m.hidden,
                 heads_key, m.heads, m.family == Family::gpt2 ? "" : "; set head_dim");
    m.head_dim = std::max<int64_t>(1, m.hidden / m.heads);
  }
  if (m.heads % m.kv_heads && r.valid({heads_key, "num_key_value_heads"}))
    r.conflict("num_key_value_heads", {heads_key},
               "num_attention_heads {} is not a multiple of num_key_value_heads {}", m.heads, m.kv_heads);
}

}  // namespace

ModelSpec parse_model_config(const std::string& text, const std::string& source) {
  const JsonValue json = parse_json(text, source);
  if (!json.is_object())
    throw ModelConfigError(
        std::vector{ModelProblem{"", fmt::format("expected a JSON object, found {}", json.kind()), {}}});
  ConfigProblems problems;
  const ConfigReader r(json, problems);
  ModelSpec m;
  m.family = r.choice_or(families, "model_type", Family::llama);
  // The other keys depend on the family.
  if (!r.given("model_type"))
    problems.add(
        "model_type", {},
        "model_type is missing: every model needs it; expected gpt2, llama, mistral, qwen2 or qwen3");
  m.vocab_size = r.size("vocab_size");
  if (problems.valid({"model_type"})) {
    if (m.family == Family::gpt2) {
      read_gpt2(r, m);
    } else {
      read_llama_like(r, m);
    }
    check_heads(r, m);
    if (m.use_rope) read_rope(r, m, problems);
    if (m.use_rope && problems.all().empty())
      if (auto conflict = rope_conflict(json))
        problems.add(std::move(conflict->key), std::move(conflict->depends), std::move(conflict->text));
  }
  r.must_be_off("quantization_config", "a quantized model");
  // With this bound no sum of bytes can overflow.
  if (problems.all().empty() && approximate_parameters(m) > 0x1p48) {
    const ModelSize largest = most_unusual_size(m);
    const std::string_view key =
        json.find(largest.key) || largest.gpt2_key.empty() ? largest.key : largest.gpt2_key;
    problems.add(std::string(key), {},
                 fmt::format("the model is too large: {} parameters; {} is {}",
                             human_count(approximate_parameters(m)), key, largest.value));
  }
  m.initializer_range = static_cast<float>(r.number_or("initializer_range", 0.02));
  if (!std::isfinite(m.initializer_range))
    r.refuse("initializer_range", "initializer_range is infinite in fp32");
  if (!problems.all().empty()) throw ModelConfigError(std::move(problems.all()));
  m.config_json = text;
  m.unread_keys = unread_keys(json, problems);
  return m;
}

std::string hugging_face_config(const ModelSpec& m, std::string_view dtype) {
  static constexpr std::string_view classes[] = {"GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM",
                                                 "Qwen2ForCausalLM", "Qwen3ForCausalLM"};
  JsonValue json = parse_json(m.config_json, "config.json");
  const auto set_default = [&](const char* key, JsonValue value) {
    if (const JsonValue* v = json.find(key); !v || v->is_null()) json.set(key, std::move(value));
  };
  json.set("architectures", JsonValue::array({classes[static_cast<int>(m.family)]}));
  json.set("model_type", name_of(m.family));
  json.set("vocab_size", m.vocab_size);
  if (m.family == Family::gpt2) {
    json.set("n_embd", m.hidden);
    json.set("n_layer", m.layers);
    json.set("n_head", m.heads);
    json.set("n_positions", m.max_positions);
    json.set("n_inner", m.ffn);
    set_default("activation_function", "gelu_new");
    set_default("layer_norm_epsilon", 1e-5);
  } else {
    json.set("hidden_size", m.hidden);
    json.set("num_hidden_layers", m.layers);
    json.set("num_attention_heads", m.heads);
    json.set("num_key_value_heads", m.kv_heads);
    json.set("head_dim", m.head_dim);
    json.set("intermediate_size", m.ffn);
    json.set("max_position_embeddings", m.max_positions);
    set_default("hidden_act", "silu");
    set_default("rms_norm_eps", 1e-6);
    write_rope(json, m);
  }
  json.set("tie_word_embeddings", m.tied);
  set_default("initializer_range", 0.02);
  json.set("torch_dtype", dtype);
  json.set("dtype", dtype);
  return json.dump(2) + "\n";
}

}  // namespace nrl::model
