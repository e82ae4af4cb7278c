#pragma once
// `nrl-train prepare`: text to a token file.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "apps/data/text_source.h"

namespace nrl::data {

struct PrepareOptions {
  std::vector<std::string> inputs;  ///< see list_inputs
  /// "bytes", "sentencepiece:MODEL", "train-sentencepiece:SIZE" (trained on a sample of the inputs),
  /// "hf:tokenizer.json", or a directory with a tokenizer
  std::string tokenizer = "bytes";
  std::string output;      ///< PREFIX of what is written: PREFIX.bin, .idx, .dataset.json and the tokenizer
  bool append_eod = true;  ///< the tokenizer's end token after every document
  ChunkOptions text;
  int workers = 0;             ///< threads; 0: one a core
  std::function<bool()> stop;  ///< polled a few times a second: true leaves with PrepareStopped
};

/// Thrown by run_prepare when `stop` asks for it; nothing of the output is left behind.
struct PrepareStopped {};

struct PrepareProgress {
  enum class Phase { sampling, training_tokenizer, tokenizing } phase = Phase::tokenizing;
  int64_t files_done = 0, files = 0;
  int64_t bytes_done = 0, bytes = 0;  ///< on disk; of the sample while it is read
  int64_t documents = 0, tokens = 0;
  double seconds = 0;  ///< since the phase began
};

struct PrepareSummary {
  int64_t files = 0;
  ChunkCounts counts;      ///< of what was replaced or left out
  Incidents json_as_text;  ///< .json files that hold no JSON lines
  int64_t documents = 0, tokens = 0;
  int64_t text_bytes = 0;           ///< of the documents
  int64_t bytes_without_token = 0;  ///< left out of documents: the tokenizer has no token for them
  int64_t vocab_size = 0;
  int64_t vocab_wanted = 0;  ///< of a tokenizer that was trained, else 0
  std::string tokenizer;     ///< "bytes", "sentencepiece" or "hf"
  std::string slow_because;  ///< Tokenizer::slow_because()
  double seconds = 0;
};

/// Makes the dataset. The result does not depend on the number of workers. `progress` is called a few times a
/// second from the calling thread, at the beginning of a phase and before the files get their
/// names. Throws Error (`usage`, `no_input`, `data` with
/// "FILE:line: ...", `cannot_create`, `io`); then no part of the output is left behind.
PrepareSummary run_prepare(const PrepareOptions& options,
                           const std::function<void(const PrepareProgress&)>& progress = {});

}  // namespace nrl::data
