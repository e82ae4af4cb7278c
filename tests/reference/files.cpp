// config.json and safetensors files of Hugging Face, read into the names of decoder.h.

#include <algorithm>
#include <bit>
#include <filesystem>
#include <stdexcept>

#include "core/io/json.h"
#include "core/io/safetensors.h"
#include "tests/reference/decoder.h"

namespace reference {
namespace {

size_t size_of(const nrl::JsonValue& json, const std::string& key, size_t fallback) {
  return static_cast<size_t>(json.get_int(key, static_cast<int64_t>(fallback)));
}

std::string activation_of(const std::string& name) {
  if (name == "silu" || name == "swish") return "silu";
  if (name == "gelu") return "gelu_erf";
  if (name == "gelu_new" || name == "gelu_fast" || name == "gelu_pytorch_tanh") return "gelu_tanh";
  throw std::runtime_error("activation " + name);
}

// Gemma 3 has rope_parameters by type of layer.
Rope read_rope(const nrl::JsonValue& json, const Config& c) {
  Rope r;
  r.theta = json.get_double("rope_theta", 10000);
  r.original_max_position = static_cast<double>(c.positions);
  double rotated = json.get_double("partial_rotary_factor", 1);
  const nrl::JsonValue* s = json.find("rope_parameters");  // transformers 5; 4 has rope_scaling
  if (!s || s->is_null()) s = json.find("rope_scaling");
  if (s && !s->is_null()) {
    r.type = s->get_string("rope_type", s->get_string("type", "default"));
    r.theta = s->get_double("rope_theta", r.theta);
    rotated = s->get_double("partial_rotary_factor", rotated);
    r.factor = s->get_double("factor", r.factor);
    r.low_freq_factor = s->get_double("low_freq_factor", r.low_freq_factor);
    r.high_freq_factor = s->get_double("high_freq_factor", r.high_freq_factor);
    r.beta_fast = s->get_double("beta_fast", r.beta_fast);
    r.beta_slow = s->get_double("beta_slow", r.beta_slow);
    r.attention_factor = s->get_double("attention_factor", r.attention_factor);
    r.truncate = s->get_bool("truncate", r.truncate);
    if (r.type != "dynamic")  // stretches from max_position_embeddings
      r.original_max_position = s->get_double("original_max_position_embeddings", r.original_max_position);
    const double mscale = s->get_double("mscale", 0), all_dim = s->get_double("mscale_all_dim", 0);
    if (r.attention_factor == 0 && mscale > 0 && all_dim > 0)
      r.attention_factor = (0.1 * mscale * std::log(r.factor) + 1) / (0.1 * all_dim * std::log(r.factor) + 1);
  }
  r.rotary_dim = static_cast<size_t>(std::lround(static_cast<double>(c.head_dim) * rotated));
  return r;
}

// One of our tensors as rows of a tensor in the file.
struct Source {
  std::string name;
  size_t first_row;
};

Source source_of(const Config& c, const std::string& name) {
  const std::string kind = name.substr(name.rfind('.'));  // ".weight" or ".bias"
  const bool gpt2 = c.gpt2();
  if (name == "embedding.weight") return {gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight", 0};
  if (name == "positions.weight") return {"transformer.wpe.weight", 0};
  if (name == "head.weight") return {"lm_head.weight", 0};
  if (name.starts_with("final_norm")) return {(gpt2 ? "transformer.ln_f" : "model.norm") + kind, 0};
  const size_t dot = name.find('.', 7);  // "layers.N.PART.weight"
  const std::string number = name.substr(7, dot - 7), part = name.substr(dot + 1, name.rfind('.') - dot - 1);
  const std::string layer = (gpt2 ? "transformer.h." : "model.layers.") + number + ".";
  static const std::map<std::string, std::pair<std::string, std::string>> names = {
      {"attention_norm", {"ln_1", "input_layernorm"}},
      {"q", {"attn.c_attn", "self_attn.q_proj"}},
      {"k", {"attn.c_attn", "self_attn.k_proj"}},
      {"v", {"attn.c_attn", "self_attn.v_proj"}},
      {"q_norm", {"", "self_attn.q_norm"}},
      {"k_norm", {"", "self_attn.k_norm"}},
      {"o", {"attn.c_proj", "self_attn.o_proj"}},
      {"mlp_norm", {"ln_2", "post_attention_layernorm"}},
      {"gate", {"", "mlp.gate_proj"}},
      {"up", {"mlp.c_fc", "mlp.up_proj"}},
      {"down", {"mlp.c_proj", "mlp.down_proj"}},
      {"attention_post_norm", {"", "post_attention_layernorm"}},
      {"mlp_post_norm", {"", "post_feedforward_layernorm"}}};
  // Experts; the names of Mixtral and Qwen.
  const bool mixtral = c.family == "mixtral";
  const std::string block = layer + (mixtral ? "block_sparse_moe." : "mlp.");
  if (part == "router") return {block + "gate" + kind, 0};
  if (part == "shared_gate") return {block + "shared_expert_gate" + kind, 0};
  if (part.starts_with("shared.")) return {block + "shared_expert." + part.substr(7) + "_proj" + kind, 0};
  if (part.starts_with("expert.")) {
    static const std::map<std::string, std::string> of_mixtral = {
        {"gate", "w1"}, {"up", "w3"}, {"down", "w2"}};
    const size_t end = part.find('.', 7);
    const std::string matrix = part.substr(end + 1);
    return {block + "experts." + part.substr(7, end - 7) + "." +
                (mixtral ? of_mixtral.at(matrix) : matrix + "_proj") + kind,
            0};
  }
  if (c.gemma() && part == "mlp_norm") return {layer + "pre_feedforward_layernorm" + kind, 0};
  const auto& [of_gpt2, of_others] = names.at(part);
  const size_t row = !gpt2 ? 0 : part == "k" ? c.hidden : part == "v" ? 2 * c.hidden : 0;
  return {layer + (gpt2 ? of_gpt2 : of_others) + kind, row};
}

// GPT-2's Conv1D keeps its matrices as (in, out).
bool transposed_in_file(const Config& c, const std::string& name) {
  return c.gpt2() && name.starts_with("layers.") && name.find("norm") == std::string::npos &&
         name.ends_with(".weight");
}

std::vector<double> to_double(const std::string& bytes, nrl::DType dtype) {
  std::vector<double> values;
  const bool wide = dtype == nrl::DType::f32;
  for (size_t i = 0; i + (wide ? 4 : 2) <= bytes.size(); i += wide ? 4 : 2) {
    uint32_t bits = 0;
    for (size_t b = 0; b < (wide ? 4 : 2); ++b)
      bits |= uint32_t{static_cast<unsigned char>(bytes[i + b])} << (8 * b);
    if (dtype == nrl::DType::f16) {
      const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
      if (exponent == 31) throw std::runtime_error("a weight is infinite or NaN");
      const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24)
                                             : std::ldexp(mantissa + 1024, static_cast<int>(exponent) - 25);
      values.push_back(bits >> 15 ? -magnitude : magnitude);
    } else {
      values.push_back(static_cast<double>(std::bit_cast<float>(wide ? bits : bits << 16)));
    }
  }
  return values;
}

std::vector<double> read_values(const nrl::SafetensorsFile& file, const nrl::TensorInfo& info) {
  if (info.dtype != nrl::DType::f32 && info.dtype != nrl::DType::bf16 && info.dtype != nrl::DType::f16)
    throw std::runtime_error(info.name + " is not f32, bf16 or f16");
  std::string bytes(info.bytes(), '\0');
  file.read(info, bytes.data(), bytes.size());
  return to_double(bytes, *info.dtype);
}

// Takes our tensor out of that of the file, (rows, columns) unless `transposed`.
void cut(const std::vector<double>& values, const Source& source, bool transposed, Tensor& to) {
  const bool vector = to.rows == 1;
  const size_t total = vector ? values.size() : values.size() / to.columns;  // rows of the file's tensor
  if (vector ? source.first_row + to.size() > total
             : values.size() % to.columns || source.first_row + to.rows > total)
    throw std::runtime_error(source.name + " has another size");
  for (size_t r = 0; r < to.rows; ++r)
    for (size_t i = 0; i < to.columns; ++i)
      to(r, i) = vector       ? values[source.first_row + i]
                 : transposed ? values[i * total + source.first_row + r]
                              : values[(source.first_row + r) * to.columns + i];
}

void read_gemma(const nrl::JsonValue& json, Config& c) {
  c.query_scalar = json.get_double("query_pre_attn_scalar", 256);
  c.window = size_of(json, "sliding_window", 4096);
  c.period = size_of(json, "sliding_window_pattern", 6);
  nrl::JsonValue full, local = nrl::JsonValue::object();
  if (const nrl::JsonValue* all = json.find("rope_parameters"); all && !all->is_null()) {
    full = all->at("full_attention");
    local = all->at("sliding_attention");
  } else {
    full = json;
    if (!json.find("rope_theta")) full.set("rope_theta", 1e6);
    local.set("rope_theta", json.get_double("rope_local_base_freq", 1e4));
  }
  c.rope = read_rope(full.find("rope_type") ? nrl::JsonValue::object({{"rope_parameters", full}}) : full, c);
  c.local_rope = read_rope(local, c);
}

Experts read_experts(const nrl::JsonValue& json, const Config& c) {
  Experts e;
  const bool mixtral = c.family == "mixtral";
  if (!mixtral && !c.family.ends_with("_moe")) return e;
  e.count = size_of(json, mixtral ? "num_local_experts" : "num_experts", 0);
  e.chosen = size_of(json, "num_experts_per_tok", 2);
  e.ffn = mixtral ? c.ffn : size_of(json, "moe_intermediate_size", 0);
  if (c.family == "qwen2_moe") e.shared_ffn = size_of(json, "shared_expert_intermediate_size", 0);
  e.normalize = mixtral || json.get_bool("norm_topk_prob", false);
  e.aux_loss = json.get_double("moe_aux_loss_coeff", 0);
  e.z_loss = json.get_double("moe_z_loss_coeff", 0);
  const size_t step = size_of(json, "decoder_sparse_step", 1);
  for (size_t i = 0; i < c.layers; ++i) e.dense.push_back(!mixtral && (i + 1) % step != 0);
  if (const nrl::JsonValue* only = json.find("mlp_only_layers"))
    for (const nrl::JsonValue& layer : only->items())
      e.dense.at(static_cast<size_t>(layer.as_double())) = true;
  return e;
}

}  // namespace

Config read_config(const std::string& directory) {
  return parse_config(nrl::read_json(directory + "/config.json").dump());
}

Config parse_config(const std::string& text) {
  const nrl::JsonValue json = nrl::parse_json(text, "config.json");
  Config c;
  c.family = json.get_string("model_type");
  c.vocab_size = size_of(json, "vocab_size", 0);
  c.initializer_range = json.get_double("initializer_range", 0.02);
  if (c.gpt2()) {
    c.hidden = size_of(json, "n_embd", 768);
    c.layers = size_of(json, "n_layer", 12);
    c.heads = c.kv_heads = size_of(json, "n_head", 12);
    c.positions = size_of(json, "n_positions", 1024);
    c.ffn = size_of(json, "n_inner", 4 * c.hidden);
    c.activation = activation_of(json.get_string("activation_function", "gelu_new"));
    c.norm_eps = json.get_double("layer_norm_epsilon", 1e-5);
    c.tied = json.get_bool("tie_word_embeddings", true);
    c.qkv_bias = c.o_bias = c.mlp_bias = true;
    c.head_dim = c.hidden / c.heads;
    return c;
  }
  c.hidden = size_of(json, "hidden_size", 0);
  c.layers = size_of(json, "num_hidden_layers", 0);
  c.heads = size_of(json, "num_attention_heads", 0);
  c.kv_heads = size_of(json, "num_key_value_heads", c.heads);
  c.head_dim = size_of(json, "head_dim", c.family == "qwen3" ? 128 : c.hidden / c.heads);
  c.ffn = size_of(json, "intermediate_size", 0);
  c.positions = size_of(json, "max_position_embeddings", 2048);
  c.activation = c.gemma() ? activation_of(json.get_string("hidden_activation", "gelu_pytorch_tanh"))
                           : activation_of(json.get_string("hidden_act", "silu"));
  c.norm_eps = json.get_double("rms_norm_eps", 1e-6);
  c.tied = json.get_bool("tie_word_embeddings", c.gemma());
  const bool attention_bias = json.get_bool("attention_bias", false);
  const bool qwen2 = c.family == "qwen2" || c.family == "qwen2_moe";
  c.qkv_bias = qwen2 || attention_bias;
  c.o_bias = !qwen2 && attention_bias;
  c.mlp_bias = json.get_bool("mlp_bias", false);
  c.qk_norm = c.family == "qwen3" || c.family == "qwen3_moe" || c.gemma();
  if (c.family == "mistral" && !(json.find("sliding_window") && json.at("sliding_window").is_null()))
    c.window = size_of(json, "sliding_window", 4096);
  if (c.family == "mixtral" && json.find("sliding_window") && !json.at("sliding_window").is_null())
    c.window = size_of(json, "sliding_window", 0);
  c.rope = read_rope(json, c);
  if (c.gemma()) read_gemma(json, c);
  c.experts = read_experts(json, c);
  return c;
}

Tensors shapes(const Config& c) {
  Tensors all;
  const auto matrix = [&](const std::string& name, size_t out, size_t in, bool bias) {
    all[name + ".weight"] = {out, in};
    if (bias) all[name + ".bias"] = {1, out};
  };
  const auto norm = [&](const std::string& name, size_t width) {
    all[name + ".weight"] = {1, width};
    if (c.gpt2()) all[name + ".bias"] = {1, width};
  };
  matrix("embedding", c.vocab_size, c.hidden, false);
  if (c.gpt2()) matrix("positions", c.positions, c.hidden, false);
  if (!c.tied) matrix("head", c.vocab_size, c.hidden, false);
  norm("final_norm", c.hidden);
  for (size_t i = 0; i < c.layers; ++i) {
    const std::string at = "layers." + std::to_string(i) + ".";
    norm(at + "attention_norm", c.hidden);
    matrix(at + "q", c.heads * c.head_dim, c.hidden, c.qkv_bias);
    matrix(at + "k", c.kv_heads * c.head_dim, c.hidden, c.qkv_bias);
    matrix(at + "v", c.kv_heads * c.head_dim, c.hidden, c.qkv_bias);
    if (c.qk_norm) {
      norm(at + "q_norm", c.head_dim);
      norm(at + "k_norm", c.head_dim);
    }
    if (c.gemma()) {
      norm(at + "attention_post_norm", c.hidden);
      norm(at + "mlp_post_norm", c.hidden);
    }
    matrix(at + "o", c.hidden, c.heads * c.head_dim, c.o_bias);
    norm(at + "mlp_norm", c.hidden);
    if (c.has_experts(i)) {
      const auto mlp = [&](const std::string& name, size_t ffn) {
        matrix(name + "gate", ffn, c.hidden, false);
        matrix(name + "up", ffn, c.hidden, false);
        matrix(name + "down", c.hidden, ffn, false);
      };
      const Experts& e = c.experts;
      matrix(at + "router", e.count, c.hidden, false);
      for (size_t x = 0; x < e.count; ++x) mlp(at + "expert." + std::to_string(x) + ".", e.ffn);
      if (e.shared_ffn > 0) {
        mlp(at + "shared.", e.shared_ffn);
        matrix(at + "shared_gate", 1, c.hidden, false);
      }
      continue;
    }
    if (!c.gpt2()) matrix(at + "gate", c.ffn, c.hidden, c.mlp_bias);
    matrix(at + "up", c.ffn, c.hidden, c.mlp_bias);
    matrix(at + "down", c.hidden, c.ffn, c.mlp_bias);
  }
  return all;
}

Tensors read_weights(const Config& c, const std::string& directory) {
  const nrl::SafetensorsSet files(directory);
  Tensors all = shapes(c);
  for (auto& [name, tensor] : all) {
    const Source source = source_of(c, name);
    const auto entry = files.at(source.name);
    cut(read_values(*entry.file, *entry.tensor), source, transposed_in_file(c, name), tensor);
  }
  return all;
}

Tensors read_optimizer_state(const Config& c, const std::string& directory, const std::string& kind) {
  // Whole tensors by their names, from pieces that may come from several ranks.
  std::map<std::string, std::vector<double>> whole;
  std::map<std::string, size_t> filled;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::string file_name = entry.path().filename();
    if (!file_name.starts_with("optimizer") || !file_name.ends_with(".safetensors")) continue;
    const nrl::SafetensorsFile file(entry.path());
    for (const nrl::TensorInfo& info : file.tensors()) {
      if (!info.name.starts_with(kind + "/")) continue;
      const size_t at = info.name.find('@');
      const std::string name =
          info.name.substr(kind.size() + 1, at == std::string::npos ? at : at - kind.size() - 1);
      const size_t offset = at == std::string::npos ? 0 : std::stoul(info.name.substr(at + 1));
      const std::vector<double> piece = read_values(file, info);
      std::vector<double>& values = whole[name];
      values.resize(std::max(values.size(), offset + piece.size()));
      std::copy(piece.begin(), piece.end(), values.begin() + static_cast<std::ptrdiff_t>(offset));
      filled[name] += piece.size();
    }
  }
  for (const auto& [name, values] : whole)
    if (filled[name] != values.size()) throw std::runtime_error(kind + "/" + name + " has gaps");
  Tensors all = shapes(c);
  for (auto& [name, tensor] : all) {
    const Source source = source_of(c, name);
    if (!whole.count(source.name)) throw std::runtime_error(kind + "/" + source.name + " is missing");
    cut(whole.at(source.name), source, false, tensor);
  }
  return all;
}

}  // namespace reference
