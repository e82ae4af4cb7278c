#include "apps/model/spec.h"

#include <cmath>
#include <span>

#include "apps/model/hf_rope.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/json.h"
#include "core/ops/attention/attention.h"
#include "core/ops/linear/linear.h"

namespace nrl::model {
namespace {

constexpr std::pair<std::string_view, Family> families[] = {{"gpt2", Family::gpt2},
                                                            {"llama", Family::llama},
                                                            {"mistral", Family::mistral},
                                                            {"qwen2", Family::qwen2},
                                                            {"qwen3", Family::qwen3}};
constexpr std::pair<std::string_view, ops::Activation> activations[] = {
    {"silu", ops::Activation::silu},           {"swish", ops::Activation::silu},
    {"gelu", ops::Activation::gelu_erf},       {"gelu_new", ops::Activation::gelu_tanh},
    {"gelu_fast", ops::Activation::gelu_tanh}, {"gelu_pytorch_tanh", ops::Activation::gelu_tanh}};

template <class... Args>
[[noreturn]] void refuse(std::string_view key, fmt::format_string<Args...> text, Args&&... args) {
  throw ModelConfigError(std::string(key), fmt::format(text, std::forward<Args>(args)...));
}

template <class T, size_t N>
T choose(const std::pair<std::string_view, T> (&table)[N], const JsonValue& value, std::string_view key) {
  const std::string& text = value.as_string();
  std::string known;
  for (const auto& [name, result] : table) {
    if (name == text) return result;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  refuse(key, "{} '{}' is not supported; supported: {}", key, text, known);
}

// Reads one config.json; errors name key and place.
class Reader {
 public:
  explicit Reader(const JsonValue& json) : json_(json) {}

  int64_t size(std::string_view key, std::string_view other = {}) const {
    const JsonValue* v = given(key, other);
    if (!v) refuse("", "the model needs '{}'", key);
    return positive(key, *v);
  }
  int64_t size_or(std::string_view key, int64_t fallback, std::string_view other = {}) const {
    const JsonValue* v = given(key, other);
    return v ? positive(key, *v) : fallback;
  }
  double number_or(std::string_view key, double fallback) const {
    const JsonValue* v = given(key);
    if (!v) return fallback;
    const double x = v->as_double();
    if (!(x >= 0) || !std::isfinite(x)) refuse(key, "{} must be a finite number of at least 0", key);
    return x;
  }
  bool flag_or(std::string_view key, bool fallback) const {
    const JsonValue* v = given(key);
    return v ? v->as_bool() : fallback;
  }
  /// The value of a key that is present and not null.
  const JsonValue* given(std::string_view key, std::string_view other = {}) const {
    const JsonValue* v = json_.find(key);
    if ((!v || v->is_null()) && !other.empty()) v = json_.find(other);
    return v && !v->is_null() ? v : nullptr;
  }
  /// Refuses a key that would change the mathematics unless it has the value that changes nothing.
  void must_be_off(std::string_view key, std::string_view what) const {
    const JsonValue* v = given(key);
    if (!v) return;
    const bool off = (v->is_bool() && !v->as_bool()) || (v->is_number() && v->as_double() == 0);
    if (!off) refuse(key, "{}: {} is not supported", key, what);
  }

 private:
  int64_t positive(std::string_view key, const JsonValue& v) const {
    const int64_t n = v.as_int();
    // The bounds keep every product of sizes far from overflow.
    const int64_t most = key == "num_hidden_layers" || key == "n_layer" ? 4096
                         : key == "hidden_size" || key == "n_embd"      ? 1 << 20
                                                                        : 1 << 24;
    if (n < 1 || n > most) refuse(key, "{} must be between 1 and {}, found {}", key, most, n);
    return n;
  }
  const JsonValue& json_;
};

void read_rope(const Reader& r, ModelSpec& m) {
  // Transformers v5 keeps everything in rope_parameters; v4 has rope_theta and rope_scaling.
  const std::string_view scaling_key = r.given("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const JsonValue* scaling = r.given(scaling_key);
  m.rope.theta = r.number_or("rope_theta", 10000.0);
  double partial = r.number_or("partial_rotary_factor", 1.0);
  m.rope.original_max_position = m.max_positions;
  if (scaling) {
    static constexpr std::pair<std::string_view, ops::RopeKind> kinds[] = {
        {"default", ops::RopeKind::standard},
        {"linear", ops::RopeKind::linear},
        {"dynamic", ops::RopeKind::dynamic},
        {"llama3", ops::RopeKind::llama3},
        {"yarn", ops::RopeKind::yarn}};
    const Reader s(*scaling);
    if (const JsonValue* kind = s.given("rope_type", "type")) m.rope.kind = choose(kinds, *kind, "rope_type");
    m.rope.theta = s.number_or("rope_theta", m.rope.theta);
    partial = s.number_or("partial_rotary_factor", partial);
    m.rope.factor = s.number_or("factor", 1.0);
    m.rope.low_freq_factor = s.number_or("low_freq_factor", 1.0);
    m.rope.high_freq_factor = s.number_or("high_freq_factor", 4.0);
    m.rope.beta_fast = s.number_or("beta_fast", 32.0);
    m.rope.beta_slow = s.number_or("beta_slow", 1.0);
    m.rope.attention_factor = s.number_or("attention_factor", 0.0);
    m.rope.truncate = s.flag_or("truncate", true);
    m.rope.original_max_position = s.size_or("original_max_position_embeddings", m.max_positions);
    if (m.rope.kind != ops::RopeKind::standard && m.rope.factor < 1)
      refuse(scaling_key, "{}.factor must be at least 1", scaling_key);
    // With equal values the two cancel; otherwise they would scale the attention.
    if (s.number_or("mscale", 1.0) != s.number_or("mscale_all_dim", 1.0) &&
        m.rope.kind == ops::RopeKind::yarn)
      refuse(scaling_key, "{}.mscale different from mscale_all_dim is not supported", scaling_key);
    if (m.rope.kind == ops::RopeKind::llama3 && m.rope.high_freq_factor <= m.rope.low_freq_factor)
      refuse(scaling_key, "{}.high_freq_factor must be greater than low_freq_factor", scaling_key);
  }
  if (m.rope.theta <= 1) refuse("rope_theta", "rope_theta must be greater than 1");
  m.rope.rotary_dim = static_cast<int64_t>(std::llround(static_cast<double>(m.head_dim) * partial));
  if (m.rope.rotary_dim < 2 || m.rope.rotary_dim % 2 || m.rope.rotary_dim > m.head_dim)
    refuse("head_dim",
           "head_dim {} x partial_rotary_factor {} gives {} rotary dimensions; an even number of at most "
           "head_dim is needed",
           m.head_dim, partial, m.rope.rotary_dim);
}

void read_gpt2(const Reader& r, ModelSpec& m) {
  m.hidden = r.size("n_embd", "hidden_size");
  m.layers = r.size("n_layer", "num_hidden_layers");
  m.heads = m.kv_heads = r.size("n_head", "num_attention_heads");
  m.max_positions = r.size_or("n_positions", 1024, "max_position_embeddings");
  m.ffn = r.size_or("n_inner", 4 * m.hidden, "intermediate_size");
  m.activation = ops::Activation::gelu_tanh;
  if (const JsonValue* v = r.given("activation_function", "hidden_act"))
    m.activation = choose(activations, *v, "activation_function");
  m.norm = ops::NormKind::layer;
  m.norm_eps = static_cast<float>(r.number_or("layer_norm_epsilon", 1e-5));
  m.norm_bias = m.qkv_bias = m.o_bias = m.mlp_bias = m.learned_positions = true;
  m.gated = m.use_rope = false;
  m.tied = r.flag_or("tie_word_embeddings", true);
  m.residual_dropout = static_cast<float>(r.number_or("resid_pdrop", 0.1));
  m.embedding_dropout = static_cast<float>(r.number_or("embd_pdrop", 0.1));
  // Hugging Face's default is 0.1, so a config that leaves it out asks for it.
  if (const double p = r.number_or("attn_pdrop", 0.1); p != 0)
    refuse("attn_pdrop", "attn_pdrop {}: dropout inside the attention is not supported; set attn_pdrop: 0",
           p);
  r.must_be_off("scale_attn_by_inverse_layer_idx", "scaling the attention by the layer");
  r.must_be_off("reorder_and_upcast_attn", "reordered attention");
  r.must_be_off("add_cross_attention", "cross attention");
}

void read_llama_like(const Reader& r, ModelSpec& m) {
  m.hidden = r.size("hidden_size");
  m.layers = r.size("num_hidden_layers");
  m.heads = r.size("num_attention_heads");
  m.kv_heads = r.size_or("num_key_value_heads", m.heads);
  m.ffn = r.size("intermediate_size");
  m.max_positions = r.size_or("max_position_embeddings", 2048);
  m.head_dim = r.size_or("head_dim", m.family == Family::qwen3 ? 128 : 0);
  if (const JsonValue* v = r.given("hidden_act")) m.activation = choose(activations, *v, "hidden_act");
  m.norm_eps = static_cast<float>(r.number_or("rms_norm_eps", 1e-6));
  const bool attention_bias = r.flag_or("attention_bias", false);
  m.qkv_bias = m.family == Family::qwen2 || attention_bias;
  m.o_bias = m.family != Family::qwen2 && attention_bias;
  m.mlp_bias = r.flag_or("mlp_bias", false);
  m.qk_norm = m.family == Family::qwen3;
  m.tied = r.flag_or("tie_word_embeddings", false);
  const bool qwen = m.family == Family::qwen2 || m.family == Family::qwen3;
  if (const JsonValue* v = r.given("sliding_window");
      v && (m.family == Family::mistral || (qwen && r.flag_or("use_sliding_window", false)))) {
    if (qwen && r.size_or("max_window_layers", m.layers) < m.layers)
      refuse("max_window_layers",
             "a sliding window in some layers only (max_window_layers) is not supported");
    // Qwen's layers below max_window_layers use full attention: with all of them below there is no window at
    // all.
    if (!qwen) m.window = v->as_int();
    if (m.window < 0) refuse("sliding_window", "sliding_window must be positive");
  }
  r.must_be_off("attention_dropout", "dropout inside the attention");
  r.must_be_off("num_local_experts", "a mixture of experts");
  r.must_be_off("num_experts", "a mixture of experts");
}

}  // namespace

std::string_view name_of(Family f) {
  for (const auto& [name, family] : families)
    if (family == f) return name;
  return "?";
}

ModelSpec parse_model_config(const std::string& text, const std::string& source) {
  const JsonValue json = parse_json(text, source);
  if (!json.is_object()) refuse("", "a model configuration is a JSON object");
  const Reader r(json);
  ModelSpec m;
  const JsonValue* type = r.given("model_type");
  if (!type) refuse("", "the model needs 'model_type': gpt2, llama, mistral, qwen2 or qwen3");
  m.family = choose(families, *type, "model_type");
  m.vocab_size = r.size("vocab_size");
  if (m.family == Family::gpt2) {
    read_gpt2(r, m);
  } else {
    read_llama_like(r, m);
  }
  r.must_be_off("quantization_config", "a quantised model");
  if (m.head_dim == 0) {
    if (m.hidden % m.heads)
      refuse("num_attention_heads", "hidden size {} is not divisible by {} attention heads; set head_dim",
             m.hidden, m.heads);
    m.head_dim = m.hidden / m.heads;
  }
  if (m.heads % m.kv_heads)
    refuse("num_key_value_heads", "num_attention_heads {} is not a multiple of num_key_value_heads {}",
           m.heads, m.kv_heads);
  if (m.use_rope) {
    require_same_rope(json);
    read_rope(r, m);
  }
  for (float p : {m.residual_dropout, m.embedding_dropout})
    if (p >= 1) refuse("", "a dropout probability of {} leaves nothing", p);
  m.initializer_range = static_cast<float>(r.number_or("initializer_range", 0.02));
  m.config_json = text;
  return m;
}

std::string hugging_face_config(const ModelSpec& m, std::string_view dtype) {
  static constexpr std::string_view classes[] = {"GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM",
                                                 "Qwen2ForCausalLM", "Qwen3ForCausalLM"};
  JsonValue json = parse_json(m.config_json, "config.json");
  json.set("architectures", JsonValue::array({classes[static_cast<int>(m.family)]}));
  json.set("model_type", name_of(m.family));
  json.set("vocab_size", m.vocab_size);
  if (m.family == Family::gpt2) {
    json.set("n_embd", m.hidden);
    json.set("n_layer", m.layers);
    json.set("n_head", m.heads);
    json.set("n_positions", m.max_positions);
    json.set("n_inner", m.ffn);
    if (!json.contains("activation_function")) json.set("activation_function", "gelu_new");
    json.set("layer_norm_epsilon", static_cast<double>(m.norm_eps));
  } else {
    json.set("hidden_size", m.hidden);
    json.set("num_hidden_layers", m.layers);
    json.set("num_attention_heads", m.heads);
    json.set("num_key_value_heads", m.kv_heads);
    json.set("head_dim", m.head_dim);
    json.set("intermediate_size", m.ffn);
    json.set("max_position_embeddings", m.max_positions);
    if (!json.contains("hidden_act")) json.set("hidden_act", "silu");
    if (!json.contains("rms_norm_eps")) json.set("rms_norm_eps", 1e-6);
    write_rope(json, m);
  }
  json.set("tie_word_embeddings", m.tied);
  if (!json.contains("initializer_range")) json.set("initializer_range", 0.02);
  json.set("torch_dtype", dtype);
  json.set("dtype", dtype);
  return json.dump(2) + "\n";
}

double training_flops_per_token(const ModelSpec& m, int64_t t) {
  const double matrices =
      ops::linear_flops(1, m.qkv_width(), m.hidden) + ops::linear_flops(1, m.hidden, m.q_width()) +
      ops::linear_flops(1, m.mlp_in_width(), m.hidden) + ops::linear_flops(1, m.hidden, m.ffn);
  const double attention = ops::attention_flops(t, m.heads, m.head_dim) / static_cast<double>(t);
  return 3 * (static_cast<double>(m.layers) * (matrices + attention) +
              ops::linear_flops(1, m.vocab_size, m.hidden));
}

}  // namespace nrl::model
