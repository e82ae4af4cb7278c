#pragma once
// Tokenizers: text to token ids and back.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::data {

/// A tokenizer. Immutable; any number of threads may use one concurrently.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Appends the ids of `text`, without beginning or end token. Returns the number of skipped bytes, for
  /// which the vocabulary has neither a token nor an unknown token. Throws Error (`data`) if the text is not
  /// valid UTF-8 (`bytes` accepts any text).
  virtual int64_t encode(std::string_view text, std::vector<int32_t>& out) const = 0;
  std::vector<int32_t> encode(std::string_view text) const {
    std::vector<int32_t> ids;
    encode(text, ids);
    return ids;
  }
  /// The text of the ids; special tokens (such as the end of a document) have none. Not valid UTF-8 if the
  /// ids end within a character. Throws Error (`data`) on an id outside [0, vocab_size()).
  virtual std::string decode(std::span<const int32_t> ids) const = 0;

  /// The largest id + 1. A model's vocabulary may be larger (padded).
  virtual int64_t vocab_size() const = 0;
  virtual std::optional<int32_t> bos() const = 0;
  /// The end-of-document token.
  virtual std::optional<int32_t> eos() const = 0;
  /// "bytes", "sentencepiece" or "hf".
  virtual std::string_view kind() const = 0;

  /// Why this tokenizer uses a slower method than others of its kind; empty if it does not.
  virtual std::string slow_reason() const { return {}; }

  struct File {
    std::string name;  ///< in a model directory: "tokenizer.json", "tokenizer.model", ...
    std::string content;
    bool derived = false;  ///< derived from the other files, for other programs
  };
  /// The files of this tokenizer for a model directory, for this and other programs. The first one is the
  /// file to load.
  virtual std::vector<File> files() const = 0;
};

/// Ids 0 to 255 are bytes, 256 is the end of a document.
std::unique_ptr<Tokenizer> make_byte_tokenizer();
/// Loads a sentencepiece model file. Throws Error: `no_input`, `data`.
std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path);
/// The same from the bytes of the file; `name` is for messages.
std::unique_ptr<Tokenizer> make_sentencepiece(std::string model, const std::string& name);
/// Loads a Hugging Face tokenizer.json with a BPE model; features without an exact equivalent are refused.
/// The names of the beginning and end tokens come from the tokenizer_config.json beside it, else common names
/// are tried. Throws Error: `no_input`, `data`.
std::unique_ptr<Tokenizer> load_hf_tokenizer(const std::string& path);

/// "bytes", "sentencepiece:MODEL", "hf:tokenizer.json", or a directory with a tokenizer.json or
/// tokenizer.model. Throws Error (`usage`) for anything else.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec);

/// Trains a BPE model with byte fallback, so that every text can be encoded and decodes to itself; returns
/// the bytes of the model file. `lines`: pieces of text without line ends. `size`: number of tokens, which
/// may not be reached on a small sample. Throws Error (`data`) if training fails.
std::string train_sentencepiece(const std::vector<std::string>& lines, int64_t size, int threads);

/// The tokenizer of a model directory. Throws Error (`no_input`) if there is none.
std::unique_ptr<Tokenizer> tokenizer_in(const std::string& directory);

}  // namespace nrl::data
