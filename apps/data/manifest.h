#pragma once
// PREFIX.dataset.json beside a token file: which tokenizer made it, so that training and generation can use
// the same.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/data/tokenizer.h"

namespace nrl::data {

struct DatasetManifest {
  std::string tokenizer_kind;  ///< "bytes", "sentencepiece" or "hf"
  std::string tokenizer_file;  ///< plain name of a file beside the manifest; empty for "bytes"
  int64_t vocab_size = 0;
  std::optional<int32_t> eod;  ///< the id that ends every document, if one was added
  int64_t documents = 0, tokens = 0, text_bytes = 0;
};

/// The files to store beside PREFIX for a dataset made with `tokenizer`: full paths, the manifest (completed
/// with the tokenizer's entries) last.
std::vector<Tokenizer::File> dataset_companions(const std::string& prefix, const Tokenizer& tokenizer,
                                                DatasetManifest manifest);

/// Reads PREFIX.dataset.json; nothing if there is none (a dataset of another program). Throws Error (`data`).
std::optional<DatasetManifest> read_manifest(const std::string& prefix);

/// The tokenizer that a dataset was made with. Throws Error: `no_input` if the dataset does not carry one,
/// `data` if it is not the one of the manifest.
std::unique_ptr<Tokenizer> tokenizer_of_dataset(const std::string& prefix);

}  // namespace nrl::data
