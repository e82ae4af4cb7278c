#pragma once
// PREFIX.dataset.json beside a token file: records its tokenizer for training and generation.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/data/tokenizer.h"

namespace nrl::data {

struct DatasetManifest {
  std::string tokenizer_kind;  ///< "bytes", "sentencepiece" or "hf"
  std::string tokenizer_file;  ///< name of a file beside the manifest; empty for "bytes"
  int64_t vocab_size = 0;
  std::optional<int32_t> eod;  ///< id of the end-of-document token, if appended
  int64_t documents = 0, tokens = 0, text_bytes = 0;
};

/// The files to store beside PREFIX for a dataset made with `tokenizer`, with full paths. The last one is
/// the manifest, to which the tokenizer's entries are added.
std::vector<Tokenizer::File> dataset_companions(const std::string& prefix, const Tokenizer& tokenizer,
                                                DatasetManifest manifest);

/// Reads PREFIX.dataset.json; unset if it does not exist (a dataset of another program).
/// Throws Error (`data`).
std::optional<DatasetManifest> read_manifest(const std::string& prefix);

/// The tokenizer of a dataset. Throws Error: `no_input` if there is no manifest, `data` if the tokenizer
/// does not match the manifest.
std::unique_ptr<Tokenizer> tokenizer_of_dataset(const std::string& prefix);

/// A warning if the tokenizer of the dataset gives other ids than `spec` (make_tokenizer()) does, which then
/// mean other text. Empty if they give the same, or if one of them is unknown.
std::string other_tokenizer_warning(const std::string& prefix, const std::string& spec);

}  // namespace nrl::data
