#pragma once
// Text to token ids and back.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::data {

/// A tokenizer. Immutable: any number of threads may use one at the same time.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Appends the ids of `text`. No beginning or end token is added. Returns the number of bytes that were
  /// left out because the vocabulary has neither a token for them nor an unknown token. Throws Error (`data`)
  /// where the text is not valid UTF-8 (except for `bytes`, which takes everything).
  virtual int64_t encode(std::string_view text, std::vector<int32_t>& out) const = 0;
  std::vector<int32_t> encode(std::string_view text) const {
    std::vector<int32_t> ids;
    encode(text, ids);
    return ids;
  }
  /// The text of the ids; special tokens (such as the end of a document) have none. The bytes need not be
  /// valid UTF-8 where the ids end within a character. Throws Error (`data`) on an id outside [0,
  /// vocab_size()).
  virtual std::string decode(std::span<const int32_t> ids) const = 0;

  /// One more than the largest id. The model may pad its tables beyond it.
  virtual int64_t vocab_size() const = 0;
  virtual std::optional<int32_t> bos() const = 0;
  /// The token that ends a document.
  virtual std::optional<int32_t> eos() const = 0;
  /// "bytes", "sentencepiece" or "hf".
  virtual std::string_view kind() const = 0;

  /// Why text is encoded by a slower method than this kind of tokenizer usually needs; empty: it is not.
  virtual std::string slow_because() const { return {}; }

  struct File {
    std::string name;  ///< in a model directory: "tokenizer.json", "tokenizer.model", ...
    std::string content;
    bool derived = false;  ///< for other programs; made from the other files
  };
  /// What a model directory needs to carry this tokenizer, readable by other programs too. The first file is
  /// the one to load.
  virtual std::vector<File> files() const = 0;
};

/// 256 ids for the bytes and 256 for the end of a document.
std::unique_ptr<Tokenizer> make_byte_tokenizer();
/// A sentencepiece model file. Throws Error: `no_input`, `data`.
std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path);
/// The same from the bytes of the file; `name` is for messages.
std::unique_ptr<Tokenizer> make_sentencepiece(std::string model, const std::string& name);
/// A Hugging Face tokenizer.json with a BPE model; what it asks for and we cannot do exactly is refused. The
/// names of the end and beginning tokens come from the tokenizer_config.json beside it, else from the usual
/// names. Throws Error: `no_input`, `data`.
std::unique_ptr<Tokenizer> load_hf_tokenizer(const std::string& path);

/// "bytes", "sentencepiece:MODEL" or "hf:tokenizer.json"; also a directory that holds a tokenizer.json or a
/// tokenizer.model. Throws Error (`usage`) for anything else.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec);

/// Trains a BPE model with byte fallback, so that every text has tokens and comes back unchanged, and returns
/// the bytes of the model file. `lines` are pieces of text without line ends; `size` counts all tokens and
/// may not be reached on a small sample. Throws Error (`data`) where training is not possible.
std::string train_sentencepiece(const std::vector<std::string>& lines, int64_t size, int threads);

/// Writes the tokenizer's files into a directory, such as a checkpoint. Throws Error: `cannot_create`, `io`.
void save_tokenizer(const Tokenizer& tokenizer, const std::string& directory);
/// The tokenizer that a model directory carries. Throws Error (`no_input`) if there is none.
std::unique_ptr<Tokenizer> tokenizer_in(const std::string& directory);

}  // namespace nrl::data
