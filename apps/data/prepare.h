#pragma once
// `nrl-train prepare`: tokenizes text into a token file.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "apps/data/text_source.h"

namespace nrl::data {

struct PrepareOptions {
  std::vector<std::string> inputs;  ///< see list_inputs
  /// "bytes", "sentencepiece:MODEL", "train-sentencepiece:SIZE" (trained on a sample of the inputs),
  /// "hf:tokenizer.json", or a directory with a tokenizer
  std::string tokenizer = "bytes";
  std::string output;      ///< PREFIX of the output: PREFIX.bin, .idx, .dataset.json and the tokenizer
  bool append_eod = true;  ///< append the tokenizer's end token to every document
  std::optional<uint64_t> shuffle_documents = {};  ///< seed of a random order; without one, input order
  ChunkOptions text;
  int workers = 0;             ///< threads; 0: one per core
  std::function<bool()> stop;  ///< polled a few times per second: true throws PrepareStopped
};

/// Thrown by run_prepare if `stop` returns true. All output is removed.
struct PrepareStopped {};

struct PrepareProgress {
  enum class Phase { sampling, training_tokenizer, tokenizing } phase = Phase::tokenizing;
  int64_t files_done = 0, files = 0;
  int64_t bytes_done = 0, bytes = 0;  ///< of the input files on disk
  int64_t documents = 0, tokens = 0;
  double seconds = 0;  ///< since the phase began
};

struct PrepareSummary {
  int64_t files = 0;
  ChunkCounts counts;      ///< replaced or skipped input
  Incidents json_as_text;  ///< .json files without JSON lines
  int64_t documents = 0, tokens = 0;
  int64_t text_bytes = 0;           ///< of the documents
  int64_t bytes_without_token = 0;  ///< skipped: the tokenizer has no token for them
  int64_t vocab_size = 0;
  int64_t vocab_wanted = 0;  ///< requested size of a trained tokenizer, else 0
  std::string slow_reason;   ///< Tokenizer::slow_reason()
  double seconds = 0;
};

/// Makes the dataset. The result does not depend on the number of workers. `progress` is called on the
/// calling thread: a few times per second, at the beginning of a phase, and before the files are renamed to
/// their final names. Throws Error (`usage`, `no_input`, `data` with "FILE:line: ...", `cannot_create`,
/// `io`); then all output is removed.
PrepareSummary run_prepare(const PrepareOptions& options,
                           const std::function<void(const PrepareProgress&)>& progress = {});

}  // namespace nrl::data
