#pragma once
// The files, besides the weights, that make a checkpoint a model directory for other programs: tokenizer
// files, token ids in config.json, generation_config.json.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/tokenizer.h"
#include "apps/model/spec/spec.h"
#include "core/config/config.h"

namespace nrl::train {

struct HfFiles {
  std::vector<data::Tokenizer::File> files;  ///< written unchanged
  /// Token ids of the tokenizer; unset if it has no such token, or is unknown.
  std::optional<int32_t> bos, eos;
  /// The padding of sequences; unset also if it is the end of a sequence.
  std::optional<int32_t> pad;
  bool keep_config_ids = false;  ///< ids in the model's own config.json take precedence
};

/// The files for the checkpoints of a run. The tokenizer is policy.tokenizer.name, else that of
/// policy.model_name, else that of the first dataset; a dataset of another program has none. Files of a
/// model directory are copied. A run on conversations with another template than the tokenizer's has it as
/// chat_template.jinja. Throws Error if the tokenizer of policy.tokenizer.name or of the dataset
/// cannot be read.
HfFiles collect_hf_files(const Config& config);

/// The tokenizer of a run by the same rule; null if unknown.
std::unique_ptr<data::Tokenizer> tokenizer_of_run(const Config& config);

/// The config.json of a checkpoint with weights of `dtype` ("float32", "bfloat16"): the model's, with
/// bos_token_id and eos_token_id (null: no such token). Of a reward model also with pad_token_id: the score
/// of a padded sequence is that of the last token that is none.
std::string hf_config_json(const model::ModelSpec& spec, std::string_view dtype, const HfFiles& hf);

/// A generation_config.json with the ids of that config.json; empty if `hf.files` has one.
std::string hf_generation_config(const std::string& config_json, const HfFiles& hf);

/// A warning if AutoTokenizer of transformers 5 would give other ids than this tokenizer, with the class to
/// use instead; else empty.
std::string auto_tokenizer_warning(const model::ModelSpec& spec, const HfFiles& hf);

}  // namespace nrl::train
