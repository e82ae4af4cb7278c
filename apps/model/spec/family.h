#pragma once
// The model families: for each a row of rules for its config.json and its weight files (family.cpp).

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/enums.h"
#include "core/ops/activation.h"

namespace nrl::model {

using Family = nrl::ModelFamily;

/// The keys and the tensor names that the families of a style share.
enum class FileStyle : uint8_t { gpt2, llama };

/// Biases of attention. configured: all projections have them if the key attention_bias says so; refused: the
/// key must be off; qkv: q, k and v always have them, and the output projection never.
enum class AttentionBias : uint8_t { configured, refused, qkv };

/// The sliding window. always: the key sliding_window, with a default; given: the key, if it is there;
/// switched: use_sliding_window turns it on from layer max_window_layers on; by_layer: layer_types or
/// sliding_window_pattern choose layers with it, whose RoPE has a base of its own.
enum class WindowRule : uint8_t { none, always, given, switched, by_layer };

/// How AutoTokenizer of transformers 5 loads the tokenizer of a checkpoint. ignores_class: not with the saved
/// class; qwen2: and with Qwen2's normalizer and pattern in place of the saved ones.
enum class AutoTokenizer : uint8_t { as_saved, ignores_class, qwen2 };

/// The mixture of experts of a family. Numbers are the defaults of transformers.
struct ExpertRules {
  std::string_view count_key = {}, count_alias = {};  ///< number of experts; empty: the family has none
  int64_t count = 0, top_k = 0;
  std::string_view ffn_key = {};   ///< inner size of an expert
  int64_t ffn = 0;                 ///< 0: as in the MLP, whose key it then has
  int64_t shared_ffn = 0;          ///< inner size of a gated expert that every token passes; 0: none
  bool always_normalized = false;  ///< the weights of the chosen experts; else norm_topk_prob says so
  bool dense_layers = false;       ///< decoder_sparse_step and mlp_only_layers choose layers with an MLP
  std::string_view module = {};    ///< of a layer in weight files
  std::string_view gate = {}, up = {}, down = {};  ///< projections of an expert in weight files

  explicit operator bool() const { return !count_key.empty(); }
};

/// Sizes that a config.json may leave out; 0: it must not.
struct DefaultSizes {
  int64_t vocab_size = 0, hidden = 0, ffn = 0, layers = 0, heads = 0, kv_heads = 0;
};

/// Numbers are the defaults of transformers.
struct FamilyRules {
  Family family;
  std::string_view architecture;     ///< the class of transformers
  std::string_view classifier = {};  ///< its class for reward models, if not named like `architecture`
  FileStyle style = FileStyle::llama;
  DefaultSizes sizes = {};
  int64_t max_positions = 2048;
  int64_t head_dim = 0;  ///< 0: hidden size / heads
  double norm_eps = 1e-6, rope_theta = 1e4;
  double local_rope_theta = 1e4;  ///< of layers with a window (WindowRule::by_layer)
  AttentionBias attention_bias = AttentionBias::configured;
  bool mlp_bias = false;  ///< the key mlp_bias may be true
  bool qk_norm = false;
  /// Norms multiply by 1 + weight and follow the sublayers as well, embeddings are multiplied by the root of
  /// their width, and query_pre_attn_scalar replaces head_dim in the scale of attention (Gemma).
  bool gemma = false;
  bool tied = false;
  std::string_view activation_key = "hidden_act";
  ops::Activation activation = ops::Activation::silu;
  WindowRule window = WindowRule::none;
  ExpertRules experts = {};
  /// Names of tensors in published files may lack this.
  std::string_view optional_prefix = {};
  AutoTokenizer auto_tokenizer = AutoTokenizer::as_saved;
  /// The model_type of a config.json whose text_config describes a model of this family, beside other parts.
  std::string_view multimodal = {};
};
const FamilyRules& rules_of(Family family);

/// The names that a tensor may have in files of weights; the last one is of the most common kind.
std::vector<std::string> names_in_files(const FamilyRules& rules, const std::string& name);
/// The name in a model of text alone of a tensor in a multimodal file; empty for the other parts of the
/// model. Other names stay as they are.
std::string name_in_text_model(const FamilyRules& rules, std::string_view name);

}  // namespace nrl::model
