#pragma once
// The model families: for each a row of rules for its config.json and its weight files (family.cpp).

#include <cstdint>
#include <string_view>

#include "core/config/enums.h"

namespace nrl::model {

using Family = nrl::ModelFamily;

/// The keys and the tensor names that the families of a style share.
enum class FileStyle : uint8_t { gpt2, llama };

/// Biases of attention. configured: all projections have them if the key attention_bias says so; refused: the
/// key must be off; qkv: q, k and v always have them, and the output projection never.
enum class AttentionBias : uint8_t { configured, refused, qkv };

/// The sliding window. always: the key sliding_window, with a default; given: the key, if it is there;
/// switched: use_sliding_window turns it on from layer max_window_layers on.
enum class WindowRule : uint8_t { none, always, given, switched };

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

/// Numbers are the defaults of transformers.
struct FamilyRules {
  Family family;
  std::string_view architecture;  ///< the class of transformers
  FileStyle style = FileStyle::llama;
  int64_t max_positions = 2048;
  int64_t head_dim = 0;  ///< 0: hidden size / heads
  double norm_eps = 1e-6, rope_theta = 1e4;
  AttentionBias attention_bias = AttentionBias::configured;
  bool mlp_bias = false;  ///< the key mlp_bias may be true
  bool qk_norm = false;
  WindowRule window = WindowRule::none;
  ExpertRules experts = {};
  /// Names of tensors in published files may lack this.
  std::string_view optional_prefix = {};
  AutoTokenizer auto_tokenizer = AutoTokenizer::as_saved;
};
const FamilyRules& rules_of(Family family);

}  // namespace nrl::model
