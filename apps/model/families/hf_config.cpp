#include "apps/model/families/hf_config.h"

#include <algorithm>
#include <cmath>

#include "apps/model/families/config_reader.h"
#include "apps/model/families/hf_rope.h"
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

void read_gpt2(const ConfigReader& r, const FamilyRules& rules, ModelSpec& m) {
  m.hidden = r.size("n_embd", "hidden_size");
  m.layers = r.size("n_layer", "num_hidden_layers");
  m.heads = m.kv_heads = r.size("n_head", "num_attention_heads");
  m.max_positions = r.size_or("n_positions", rules.max_positions, "max_position_embeddings");
  // Only in older files; transformers ignores it.
  if (const JsonValue* n_ctx = r.find("n_ctx"))
    if (n_ctx->is_number() && n_ctx->as_double() == static_cast<double>(m.max_positions))
      r.note_read({"n_ctx"});
  m.ffn = r.size_or("n_inner", 4 * m.hidden);
  m.activation = r.choice_or(activations, "activation_function", ops::Activation::gelu_tanh);
  m.norm = ops::NormKind::layer;
  m.norm_eps = static_cast<float>(r.positive_or("layer_norm_epsilon", rules.norm_eps));
  m.norm_bias = m.qkv_bias = m.o_bias = m.mlp_bias = m.learned_positions = true;
  m.gated = m.use_rope = false;
  m.layer_kinds.assign(static_cast<size_t>(m.layers), {});
  m.tied = r.flag_or("tie_word_embeddings", true);
  m.residual_dropout = r.dropout_or("resid_pdrop", 0.1);
  m.embedding_dropout = r.dropout_or("embd_pdrop", 0.1);
  m.attention_dropout = r.dropout_or("attn_pdrop", 0.1);
  r.must_be_on("scale_attn_weights", "attention without scaling by 1/sqrt(head_dim)");
  for (const char* bias : {"attention_bias", "mlp_bias"}) r.must_be_on(bias, "a GPT-2 without biases");
  r.must_be_off("scale_attn_by_inverse_layer_idx", "scaling attention by the layer index");
  r.must_be_off("reorder_and_upcast_attn", "reordered and upcast attention");
  r.must_be_off("add_cross_attention", "cross attention");
}

void read_window(const ConfigReader& r, WindowRule rule, ModelSpec& m) {
  constexpr int64_t missing = 4096;  // default of transformers for a missing key; null means no window
  const bool null = r.find("sliding_window") && !r.given("sliding_window");
  const bool by_layer = rule == WindowRule::by_layer;
  int64_t window = 0;
  if ((rule == WindowRule::always || by_layer) && !null) window = r.size_or("sliding_window", missing);
  if (rule == WindowRule::given && r.given("sliding_window")) window = r.size("sliding_window");
  m.layer_kinds.assign(static_cast<size_t>(m.layers), {.window = window});
  if (by_layer) return read_layer_kinds(r, window, m);
  const bool switched = rule == WindowRule::switched;
  // Both depend on use_sliding_window, which files of transformers have, often false.
  if (switched && r.find("use_sliding_window"))
    r.note_read({"sliding_window", "max_window_layers"});
  else if (switched)
    r.note_unused({"sliding_window", "max_window_layers"});
  if (switched && !null && r.flag_or("use_sliding_window", false) &&
      r.size_or("max_window_layers", 28) < m.layers && r.valid({"max_window_layers", "num_hidden_layers"}))
    r.conflict("max_window_layers", {"num_hidden_layers"},
               "max_window_layers: a sliding window in only some layers is not supported");
  const std::string_view kind = window > 0 ? "sliding_attention" : "full_attention";
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

// Which layers have an ordinary MLP.
void read_dense_layers(const ConfigReader& r, const ExpertRules& rules, ModelSpec& m) {
  m.moe.dense.assign(static_cast<size_t>(m.layers), 0);
  if (!rules.dense_layers) return;
  const int64_t step = r.size_or("decoder_sparse_step", 1);
  for (int64_t i = 0; i < m.layers; ++i) m.moe.dense[i] = (i + 1) % step != 0;
  const JsonValue* only = r.given("mlp_only_layers");
  if (!only) return;
  bool valid = only->is_array();
  if (valid)
    for (const JsonValue& layer : only->items()) {
      const double i = layer.is_number() ? layer.as_double() : -1;
      // Layers that the model does not have are ignored, as in transformers.
      if (i < 0 || i != std::floor(i)) {
        valid = false;
      } else if (i < static_cast<double>(m.layers)) {
        m.moe.dense[i] = 1;
      }
    }
  if (!valid) r.refuse("mlp_only_layers", "mlp_only_layers must be a list of layer indices");
}

// Training of the router: keys of Megatron-LM, which transformers does not have.
void read_router_training(const ConfigReader& r, MoeSpec& e) {
  static constexpr std::pair<std::string_view, std::optional<AuxLoss>> kinds[] = {
      {"aux_loss", AuxLoss::microbatch},
      {"seq_aux_loss", AuxLoss::sequence},
      {"global_aux_loss", AuxLoss::global},
      {"none", std::nullopt}};
  static constexpr std::pair<std::string_view, bool> policies[] = {{"probs", true}, {"position", false}};
  const std::optional<AuxLoss> balance =
      r.choice_or(kinds, "moe_router_load_balancing_type", std::optional(AuxLoss::microbatch));
  e.aux_loss = static_cast<float>(r.number_or("moe_aux_loss_coeff", 0));
  e.aux_tokens = balance.value_or(AuxLoss::microbatch);
  if (!balance && e.aux_loss != 0)
    r.conflict("moe_aux_loss_coeff", {"moe_router_load_balancing_type"},
               "moe_aux_loss_coeff is {}, but moe_router_load_balancing_type is none", e.aux_loss);
  e.z_loss = static_cast<float>(r.number_or("moe_z_loss_coeff", 0));
  e.capacity_factor =
      r.given("moe_expert_capacity_factor") ? r.positive_or("moe_expert_capacity_factor", 1) : 0;
  e.pad_to_capacity = r.flag_or("moe_pad_expert_input_to_capacity", false);
  e.drop_by_probability = r.choice_or(policies, "moe_token_drop_policy", true);
  static constexpr std::pair<std::string_view, TokenDispatcher> dispatchers[] = {
      {"alltoall", TokenDispatcher::alltoall}, {"allgather", TokenDispatcher::allgather}};
  e.dispatcher = r.choice_or(dispatchers, "moe_token_dispatcher_type", TokenDispatcher::alltoall);
  constexpr double usual_slack = 1.25;
  e.row_slack = r.number_or("moe_row_slack", usual_slack);
  if (e.pad_to_capacity && e.capacity_factor == 0)
    r.refuse("moe_pad_expert_input_to_capacity",
             "moe_pad_expert_input_to_capacity needs moe_expert_capacity_factor");
  if (e.capacity_factor == 0 && !e.drop_by_probability)
    r.refuse("moe_token_drop_policy",
             "moe_token_drop_policy has no effect: no token is dropped without moe_expert_capacity_factor");
}

// Routers that transformers does not have in these families: keys of Megatron-LM.
void read_router(const ConfigReader& r, MoeSpec& e) {
  static constexpr std::pair<std::string_view, ops::RouterScore> scores[] = {
      {"softmax", ops::RouterScore::softmax}, {"sigmoid", ops::RouterScore::sigmoid}};
  e.rule.score = r.choice_or(scores, "moe_router_score_function", ops::RouterScore::softmax);
  e.rule.scale = static_cast<float>(
      r.given("moe_router_topk_scaling_factor") ? r.positive_or("moe_router_topk_scaling_factor", 1) : 1);
  const bool groups = r.given("moe_router_num_groups"), chosen = r.given("moe_router_group_topk");
  if (groups != chosen)
    r.refuse(groups ? "moe_router_num_groups" : "moe_router_group_topk",
             "moe_router_num_groups and moe_router_group_topk need each other: {} is missing",
             groups ? "moe_router_group_topk" : "moe_router_num_groups");
  if (groups) e.rule.groups = r.size_or("moe_router_num_groups", 1);
  if (chosen) e.rule.group_top_k = r.size_or("moe_router_group_topk", 1);
  e.expert_bias = r.flag_or("moe_router_enable_expert_bias", false);
  if (e.expert_bias && e.rule.score == ops::RouterScore::softmax)
    r.refuse(
        "moe_router_enable_expert_bias",
        "moe_router_enable_expert_bias needs moe_router_score_function: sigmoid: a bias would outweigh the "
        "scores of a softmax over many experts");
  constexpr double usual_rate = 1e-3;
  const double bias_rate = r.number_or("moe_router_bias_update_rate", usual_rate);
  if (e.expert_bias)
    e.bias_rate = static_cast<float>(bias_rate);
  else if (bias_rate != 0 && bias_rate != usual_rate)
    r.refuse("moe_router_bias_update_rate",
             "moe_router_bias_update_rate has no effect without moe_router_enable_expert_bias: true");
}

void read_experts(const ConfigReader& r, const ExpertRules& rules, ModelSpec& m) {
  MoeSpec& e = m.moe;
  e.experts = r.size_or(rules.count_key, rules.count, rules.count_alias);
  e.rule.top_k = r.size_or("num_experts_per_tok", rules.top_k);
  e.rule.normalize = rules.always_normalized || r.flag_or("norm_topk_prob", false);
  e.ffn = rules.ffn == 0 ? m.ffn : r.size_or(rules.ffn_key, rules.ffn);
  if (rules.always_normalized) {
    if (r.number_or("router_jitter_noise", 0) != 0)
      r.refuse("router_jitter_noise", "router_jitter_noise is not supported. Fix: 0");
    r.must_be_off("norm_topk_prob", "Mixtral without normalized weights");
  }
  if (rules.shared_ffn > 0) {
    e.shared_ffn = r.size_or("shared_expert_intermediate_size", rules.shared_ffn);
    e.shared_gate = true;
  }
  m.gated = true;
  if (r.valid({"num_hidden_layers", "decoder_sparse_step"})) read_dense_layers(r, rules, m);
  read_router(r, e);
  const char* reason = ops::unsupported(e.rule, e.experts);
  const bool grouped = e.rule.groups > 1 || e.rule.group_top_k > 1;
  if (reason[0] != 0 && r.valid({rules.count_key, "num_experts_per_tok"}) && !grouped)
    r.conflict("num_experts_per_tok", {std::string(rules.count_key)},
               "num_experts_per_tok is {} of {} experts: {}", e.rule.top_k, e.experts, reason);
  if (reason[0] != 0 && grouped &&
      r.valid({rules.count_key, "num_experts_per_tok", "moe_router_num_groups", "moe_router_group_topk"}))
    r.conflict("moe_router_num_groups",
               {std::string(rules.count_key), "num_experts_per_tok", "moe_router_group_topk"},
               "moe_router_num_groups is {} with moe_router_group_topk {}, {} experts and {} per token: {}",
               e.rule.groups, e.rule.group_top_k, e.experts, e.rule.top_k, reason);
  read_router_training(r, e);
}

void read_gemma(const ConfigReader& r, ModelSpec& m) {
  constexpr double missing = 256;  // default of transformers
  m.norm_offset = 1;
  m.post_norms = m.scaled_embedding = true;
  m.query_scalar = r.positive_or("query_pre_attn_scalar", missing);
  r.must_be_off("attn_logit_softcapping", "a soft cap of attention logits");
  r.must_be_off("final_logit_softcapping", "a soft cap of the logits");
  r.must_be_off("use_bidirectional_attention", "attention to later tokens");
}

void read_llama_like(const ConfigReader& r, const FamilyRules& rules, ModelSpec& m) {
  const auto size = [&](std::string_view key, int64_t fallback) {
    return fallback > 0 ? r.size_or(key, fallback) : r.size(key);
  };
  m.hidden = size("hidden_size", rules.sizes.hidden);
  m.layers = size("num_hidden_layers", rules.sizes.layers);
  m.heads = size("num_attention_heads", rules.sizes.heads);
  m.kv_heads = r.size_or("num_key_value_heads", rules.sizes.kv_heads > 0 ? rules.sizes.kv_heads : m.heads);
  m.ffn = size("intermediate_size", rules.sizes.ffn);
  m.max_positions = r.size_or("max_position_embeddings", rules.max_positions);
  m.head_dim = r.size_or("head_dim", rules.head_dim);
  m.activation = r.choice_or(activations, rules.activation_key, rules.activation);
  m.norm_eps = static_cast<float>(r.positive_or("rms_norm_eps", rules.norm_eps));
  const bool attention_bias = r.flag_or("attention_bias", false),
             qkv = rules.attention_bias == AttentionBias::qkv;
  m.qkv_bias = qkv || attention_bias;
  m.o_bias = !qkv && attention_bias;
  // transformers has no such biases in these families and would not read them.
  if (!rules.mlp_bias) r.must_be_off("mlp_bias", "an MLP bias in this model_type");
  if (rules.attention_bias == AttentionBias::refused)
    r.must_be_off("attention_bias", "an attention bias in this model_type");
  m.mlp_bias = r.flag_or("mlp_bias", false);
  m.qk_norm = rules.qk_norm;
  m.tied = r.flag_or("tie_word_embeddings", rules.tied);
  if (rules.gemma) read_gemma(r, m);
  m.attention_dropout = r.dropout_or("attention_dropout", 0.0);
  read_window(r, rules.window, m);
  if (rules.experts) {
    read_experts(r, rules.experts, m);
    return;
  }
  r.must_be_off("num_local_experts", "a mixture of experts");
  r.must_be_off("num_experts", "a mixture of experts");
}

/// The end of the class names of models with a score instead of logits.
constexpr std::string_view classifier = "ForSequenceClassification";

// A class of sequence classification with one label is a reward model.
void read_head(const ConfigReader& r, ModelSpec& m) {
  const JsonValue* classes = r.find("architectures");
  const auto scores = [](const JsonValue& name) {
    return name.is_string() && name.as_string().ends_with(classifier);
  };
  if (!classes || !(classes->is_array() ? std::ranges::any_of(classes->items(), scores) : scores(*classes)))
    return;
  constexpr int64_t missing = 2;  // default of transformers
  const JsonValue* names = r.find("id2label");
  const int64_t labels = r.size_or(
      "num_labels", names && names->is_object() ? static_cast<int64_t>(names->members().size()) : missing);
  if (labels != 1 && r.valid({"num_labels"}))
    r.refuse("num_labels", "a {} model with {} labels is not supported; expected a reward model, with 1",
             classifier, labels);
  m.head = HeadKind::scalar;
  m.tied = false;
}

// Constraints between head counts and widths.
void check_heads(const ConfigReader& r, FileStyle style, ModelSpec& m) {
  const bool gpt2 = style == FileStyle::gpt2, own_keys = gpt2 && r.given("n_head");
  const std::string hidden_key = own_keys ? "n_embd" : "hidden_size",
                    heads_key = own_keys ? "n_head" : "num_attention_heads";
  if (m.head_dim == 0) {
    if (m.hidden % m.heads && r.valid({hidden_key, heads_key}))
      r.conflict(heads_key, {hidden_key}, "{} {} is not divisible by {} {}{}", hidden_key, m.hidden,
                 heads_key, m.heads, gpt2 ? "" : "; set head_dim");
    m.head_dim = std::max<int64_t>(1, m.hidden / m.heads);
  }
  if (m.heads % m.kv_heads && r.valid({heads_key, "num_key_value_heads"}))
    r.conflict("num_key_value_heads", {heads_key},
               "num_attention_heads {} is not a multiple of num_key_value_heads {}", m.heads, m.kv_heads);
}

// The model_type of a router that transformers does not have in this family.
std::string own_router_type(std::string_view family) {
  return fmt::format("nrl_{}", family);
}

// The model types of transformers, and those that hugging_face_config() writes for other routers.
std::vector<std::pair<std::string_view, Family>> model_types() {
  static const std::vector<std::string> own = [] {
    std::vector<std::string> names;
    for (const std::string_view name : EnumNames<Family>::names) names.push_back(own_router_type(name));
    return names;
  }();
  std::vector<std::pair<std::string_view, Family>> out;
  for (size_t i = 0; i < own.size(); ++i)
    out.emplace_back(EnumNames<Family>::names[i], static_cast<Family>(i));
  for (size_t i = 0; i < own.size(); ++i)
    if (const auto family = static_cast<Family>(i); rules_of(family).experts)
      out.emplace_back(own[i], family);
  return out;
}

// The text part of a multimodal config.json as a config.json of its own. It has the keys beside text_config
// as well, overrides among them, unless they describe the whole model.
JsonValue text_part(JsonValue json) {
  const JsonValue *type = json.find("model_type"), *text = json.find("text_config");
  if (!type || !type->is_string() || !text || !text->is_object()) return json;
  for (size_t i = 0; i < std::size(EnumNames<Family>::names); ++i) {
    const auto family = static_cast<Family>(i);
    if (rules_of(family).multimodal != type->as_string() || rules_of(family).multimodal.empty()) continue;
    JsonValue out = *text;
    static constexpr std::string_view of_the_whole[] = {
        "model_type",      "architectures",   "text_config",       "vision_config", "mm_tokens_per_image",
        "boi_token_index", "eoi_token_index", "image_token_index", "image_token_id"};
    for (const JsonMember& member : json.members())
      if (std::ranges::find(of_the_whole, member.key) == std::end(of_the_whole))
        out.set(member.key, member.value);
    out.set("model_type", EnumNames<Family>::names[i]);
    return out;
  }
  return json;
}

}  // namespace

ModelSpec parse_model_config(const std::string& text, const std::string& source) {
  const JsonValue whole = parse_json(text, source);
  if (!whole.is_object())
    throw ModelConfigError(
        std::vector{ModelProblem{"", fmt::format("expected a JSON object, found {}", whole.kind()), {}}});
  const JsonValue json = text_part(whole);
  ConfigProblems problems;
  const ConfigReader r(json, problems);
  ModelSpec m;
  const JsonValue* type = r.given("model_type");
  const bool deepseek = type && type->is_string() && type->as_string().starts_with("deepseek");
  if (deepseek)
    r.refuse("model_type",
             "model_type {} is not supported: its multi-head latent attention is not built (its router is)",
             type->as_string());
  else
    m.family = r.choice_or<Family>(model_types(), "model_type", Family::llama);
  // The other keys depend on the family.
  if (!r.given("model_type"))
    problems.add("model_type", {},
                 fmt::format("model_type is missing: every model needs it; expected {}",
                             alternatives(EnumNames<Family>::names)));
  const FamilyRules& rules = rules_of(m.family);
  m.vocab_size =
      rules.sizes.vocab_size > 0 ? r.size_or("vocab_size", rules.sizes.vocab_size) : r.size("vocab_size");
  if (problems.valid({"model_type"})) {
    if (rules.style == FileStyle::gpt2) {
      read_gpt2(r, rules, m);
    } else {
      read_llama_like(r, rules, m);
    }
    check_heads(r, rules.style, m);
    read_head(r, m);
    if (m.use_rope) read_rope(r, m, problems);
    if (m.use_rope && problems.all().empty())
      if (auto conflict = rope_conflict(json))
        problems.add(std::move(conflict->key), std::move(conflict->depends), std::move(conflict->text));
  }
  r.must_be_off("quantization_config", "a quantized model");
  // With this bound no sum of bytes can overflow.
  if (problems.all().empty() && approximate_parameters(m) > 0x1p48) {
    const ModelSize largest = unusual_sizes(m).front();
    const std::string_view key =
        json.find(largest.key) || largest.alias.empty() ? largest.key : largest.alias;
    problems.add(std::string(key), {},
                 fmt::format("the model is too large: {} parameters; {} is {}",
                             human_count(approximate_parameters(m)), key, largest.value));
  }
  m.initializer_range = static_cast<float>(r.number_or("initializer_range", 0.02));
  if (!std::isfinite(m.initializer_range))
    r.refuse("initializer_range", "initializer_range is infinite in fp32");
  if (!problems.all().empty()) throw ModelConfigError(std::move(problems.all()));
  m.config_json = json.find("text_config") || !whole.find("text_config") ? text : json.dump(2);
  m.unread_keys = unread_keys(json, problems);
  return m;
}

// A router that transformers does not have in this family.
static bool own_router(const ModelSpec& m) {
  const ops::RouterRule& rule = m.moe.rule;
  return rule.score != ops::RouterScore::softmax || rule.scale != 1 || rule.group_top_k < rule.groups ||
         m.moe.expert_bias;
}

static void write_experts(JsonValue& json, const ExpertRules& rules, const ModelSpec& m) {
  if (m.moe.experts == 0) return;
  json.set(std::string(rules.count_key), m.moe.experts);
  json.set("num_experts_per_tok", m.moe.rule.top_k);
  if (own_router(m)) {
    // transformers would load the weights and route otherwise.
    json.set("model_type", own_router_type(name_of(m.family)));
    json.set("architectures", JsonValue::array({}));
  }
  if (!rules.always_normalized) json.set("norm_topk_prob", m.moe.rule.normalize);
  if (rules.ffn > 0) json.set(std::string(rules.ffn_key), m.moe.ffn);
  if (m.moe.shared_ffn > 0) json.set("shared_expert_intermediate_size", m.moe.shared_ffn);
}

static void write_scalar_head(JsonValue& json, const FamilyRules& rules) {
  std::string name(rules.classifier);
  if (name.empty()) {
    name = rules.architecture;
    name.resize(name.size() - (name.ends_with("LMHeadModel") ? sizeof "LMHeadModel" : sizeof "ForCausalLM") +
                1);
    name += classifier;
  }
  json.set("architectures", JsonValue::array({name}));
  json.set("num_labels", 1);
  json.set("id2label", JsonValue::object({{"0", "LABEL_0"}}));
  json.set("label2id", JsonValue::object({{"LABEL_0", 0}}));
}

std::string hugging_face_config(const ModelSpec& m, std::string_view dtype) {
  const FamilyRules& rules = rules_of(m.family);
  JsonValue json = parse_json(m.config_json, "config.json");
  const auto set_default = [&](const char* key, JsonValue value) {
    if (const JsonValue* v = json.find(key); !v || v->is_null()) json.set(key, std::move(value));
  };
  json.set("architectures", JsonValue::array({rules.architecture}));
  json.set("model_type", name_of(m.family));
  json.set("vocab_size", m.vocab_size);
  if (rules.style == FileStyle::gpt2) {
    json.set("n_embd", m.hidden);
    json.set("n_layer", m.layers);
    json.set("n_head", m.heads);
    json.set("n_positions", m.max_positions);
    json.set("n_inner", m.ffn);
    set_default("activation_function", "gelu_new");
    set_default("layer_norm_epsilon", rules.norm_eps);
  } else {
    json.set("hidden_size", m.hidden);
    json.set("num_hidden_layers", m.layers);
    json.set("num_attention_heads", m.heads);
    json.set("num_key_value_heads", m.kv_heads);
    json.set("head_dim", m.head_dim);
    json.set("intermediate_size", m.ffn);
    json.set("max_position_embeddings", m.max_positions);
    if (rules.gemma) {
      set_default("hidden_activation", "gelu_pytorch_tanh");
      set_default("query_pre_attn_scalar", m.query_scalar);
    } else {
      set_default("hidden_act", "silu");
    }
    set_default("rms_norm_eps", rules.norm_eps);
    if (rules.window == WindowRule::by_layer)
      write_layer_kinds(json, m);
    else
      write_rope(json, m);
    write_experts(json, rules.experts, m);
  }
  if (m.head == HeadKind::scalar)
    write_scalar_head(json, rules);
  else
    json.set("tie_word_embeddings", m.tied);
  set_default("initializer_range", 0.02);
  json.set("torch_dtype", dtype);
  json.set("dtype", dtype);
  return json.dump(2) + "\n";
}

}  // namespace nrl::model
