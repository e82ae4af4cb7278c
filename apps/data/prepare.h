#pragma once
// `nrl-train prepare`: text to a token file.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace nrl::data {

struct PrepareOptions {
  std::vector<std::string> inputs;  ///< text files, .jsonl files, folders of both
  /// "bytes", "sentencepiece:MODEL", "train-sentencepiece:SIZE" (trained on a sample of the inputs),
  /// "hf:tokenizer.json", or a directory with a tokenizer
  std::string tokenizer = "bytes";
  std::string output;      ///< PREFIX of what is written: PREFIX.bin, .idx, .dataset.json and the tokenizer
  bool append_eod = true;  ///< the tokenizer's end token after every document
  std::string jsonl_key = "text";  ///< where a JSON line has its text
  bool skip_bad_lines = false;     ///< count malformed JSON lines instead of stopping at the first
  int workers = 0;                 ///< threads; 0: one a core
};

struct PrepareProgress {
  enum class Phase { sampling, training_tokenizer, tokenizing } phase = Phase::tokenizing;
  int64_t files_done = 0, files = 0;
  int64_t bytes_done = 0, bytes = 0;
  int64_t documents = 0, tokens = 0;
};

struct PrepareSummary {
  int64_t files = 0;         ///< that gave documents or were skipped
  int64_t binary_files = 0;  ///< skipped: not UTF-8 text
  int64_t bad_lines = 0;     ///< skipped JSON lines
  int64_t documents = 0, tokens = 0;
  int64_t text_bytes = 0;           ///< of the documents
  int64_t bytes_without_token = 0;  ///< left out of documents: the tokenizer has no token for them
  int64_t vocab_size = 0;
  std::string tokenizer;     ///< "bytes", "sentencepiece" or "hf"
  std::string slow_because;  ///< Tokenizer::slow_because()
  double seconds = 0;
};

/// Makes the dataset. The result does not depend on the number of workers. `progress` is called a few times a
/// second from the calling thread, and once at the end. Throws Error (`usage`, `no_input`, `data` with
/// "FILE:line: ...", `cannot_create`, `io`); then no part of the output is left behind.
PrepareSummary run_prepare(const PrepareOptions& options,
                           const std::function<void(const PrepareProgress&)>& progress = {});

}  // namespace nrl::data
