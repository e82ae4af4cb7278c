#pragma once
// What makes a checkpoint a model directory that other programs can use, besides the weights: the tokenizer's
// files, token ids in config.json, generation_config.json, and what the start directory had of these.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/tokenizer.h"
#include "apps/model/spec.h"
#include "core/config/config.h"

namespace nrl::train {

struct HfFiles {
  std::vector<data::Tokenizer::File> files;  ///< to be written as they are
  /// Ids of the tokenizer; nothing where it has no such token, or is not known.
  std::optional<int32_t> bos, eos;
  bool keep_config_ids = false;  ///< config.json's own ids go before these
};

/// The files for the checkpoints of a run. The tokenizer is policy.tokenizer.name, else the one in
/// policy.model_name, else the one of the first data set; a data set of another program has none. Files of a
/// directory are copied. Throws Error where a tokenizer that policy.tokenizer.name or the data set names
/// cannot be read.
HfFiles collect_hf_files(const Config& config);

/// The tokenizer of a run, by the same rule; null where it is not known.
std::unique_ptr<data::Tokenizer> tokenizer_of_run(const Config& config);

/// The config.json of a checkpoint with weights of `dtype` ("float32", "bfloat16"): the model's, with
/// bos_token_id and eos_token_id, null where there is no such token.
std::string hf_config_json(const model::ModelSpec& spec, std::string_view dtype, const HfFiles& hf);

/// A generation_config.json with the ids of that config.json; empty where `hf.files` has one.
std::string hf_generation_config(const std::string& config_json, const HfFiles& hf);

/// Which class of transformers 5 gets this tokenizer's ids where AutoTokenizer does not, as a warning for the
/// user; empty where AutoTokenizer does.
std::string auto_tokenizer_warning(const model::ModelSpec& spec, const HfFiles& hf);

}  // namespace nrl::train
