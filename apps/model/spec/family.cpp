#include "apps/model/spec/family.h"

#include <iterator>

namespace nrl::model {
namespace {

constexpr ExpertRules qwen_experts{.count_key = "num_experts",
                                   .count_alias = "num_local_experts",
                                   .count = 128,
                                   .top_k = 8,
                                   .ffn_key = "moe_intermediate_size",
                                   .ffn = 768,
                                   .dense_layers = true,
                                   .module = "mlp.",
                                   .gate = "gate_proj",
                                   .up = "up_proj",
                                   .down = "down_proj"};

constexpr ExpertRules qwen2_experts() {
  ExpertRules e = qwen_experts;
  e.count = 60;
  e.top_k = 4;
  e.ffn = 1408;
  e.shared_ffn = 5632;
  return e;
}

// In the order of the enumeration.
constexpr FamilyRules rules[] = {
    {.family = Family::gpt2,
     .architecture = "GPT2LMHeadModel",
     .style = FileStyle::gpt2,
     .max_positions = 1024,
     .norm_eps = 1e-5,
     .optional_prefix = "transformer."},
    {.family = Family::llama, .architecture = "LlamaForCausalLM", .mlp_bias = true},
    {.family = Family::mistral,
     .architecture = "MistralForCausalLM",
     .max_positions = 131072,
     .attention_bias = AttentionBias::refused,
     .window = WindowRule::always,
     .auto_tokenizer = AutoTokenizer::ignores_class},
    {.family = Family::qwen2,
     .architecture = "Qwen2ForCausalLM",
     .max_positions = 32768,
     .attention_bias = AttentionBias::qkv,
     .window = WindowRule::switched,
     .auto_tokenizer = AutoTokenizer::qwen2},
    {.family = Family::qwen3,
     .architecture = "Qwen3ForCausalLM",
     .max_positions = 32768,
     .head_dim = 128,
     .qk_norm = true,
     .window = WindowRule::switched},
    {.family = Family::mixtral,
     .architecture = "MixtralForCausalLM",
     .max_positions = 131072,
     .norm_eps = 1e-5,
     .rope_theta = 1e6,
     .attention_bias = AttentionBias::refused,
     .window = WindowRule::given,
     // transformers 5 knows both names of Mixtral's experts.
     .experts = {.count_key = "num_local_experts",
                 .count_alias = "num_experts",
                 .count = 8,
                 .top_k = 2,
                 .ffn_key = "intermediate_size",
                 .always_normalized = true,
                 .module = "block_sparse_moe.",
                 .gate = "w1",
                 .up = "w3",
                 .down = "w2"}},
    {.family = Family::qwen2_moe,
     .architecture = "Qwen2MoeForCausalLM",
     .max_positions = 32768,
     .attention_bias = AttentionBias::qkv,
     .window = WindowRule::switched,
     .experts = qwen2_experts()},
    {.family = Family::qwen3_moe,
     .architecture = "Qwen3MoeForCausalLM",
     .max_positions = 32768,
     .qk_norm = true,
     .window = WindowRule::switched,
     .experts = qwen_experts},
    {.family = Family::gemma3_text,
     .architecture = "Gemma3ForCausalLM",
     .classifier = "Gemma3TextForSequenceClassification",
     .sizes = {.vocab_size = 262208, .hidden = 2304, .ffn = 9216, .layers = 26, .heads = 8, .kv_heads = 4},
     .max_positions = 131072,
     .head_dim = 256,
     .rope_theta = 1e6,
     .qk_norm = true,
     .gemma = true,
     .tied = true,
     .activation_key = "hidden_activation",
     .activation = ops::Activation::gelu_tanh,
     .window = WindowRule::by_layer,
     .multimodal = "gemma3"},
};
static_assert(std::size(rules) == std::size(EnumNames<Family>::names));
static_assert([] {
  for (size_t i = 0; i < std::size(rules); ++i)
    if (rules[i].family != static_cast<Family>(i)) return false;
  return true;
}());

}  // namespace

const FamilyRules& rules_of(Family family) {
  return rules[static_cast<size_t>(family)];
}

namespace {

constexpr std::string_view decoder_prefix = "model.";
// Multimodal files of transformers before and since version 4.52.
constexpr std::string_view text_prefix = "language_model.", text_decoder_prefix = "model.language_model.";
constexpr std::string_view parts_left_out[] = {"vision_tower.", "multi_modal_projector.",
                                               "model.vision_tower.", "model.multi_modal_projector."};

}  // namespace

std::vector<std::string> names_in_files(const FamilyRules& rules, const std::string& name) {
  if (!rules.multimodal.empty()) {
    std::vector<std::string> names{std::string(text_prefix) + name, name};
    if (name.starts_with(decoder_prefix))
      names.insert(names.begin(), std::string(text_decoder_prefix) + name.substr(decoder_prefix.size()));
    return names;
  }
  std::vector<std::string> names{name};
  const std::string_view prefix = rules.optional_prefix;
  if (!prefix.empty() && name.starts_with(prefix)) names.push_back(name.substr(prefix.size()));
  return names;
}

std::string name_in_text_model(const FamilyRules& rules, std::string_view name) {
  if (rules.multimodal.empty()) return std::string(name);
  for (const std::string_view part : parts_left_out)
    if (name.starts_with(part)) return {};
  if (name.starts_with(text_prefix)) name.remove_prefix(text_prefix.size());
  if (!name.starts_with(text_decoder_prefix)) return std::string(name);
  return std::string(decoder_prefix).append(name.substr(text_decoder_prefix.size()));
}

}  // namespace nrl::model
