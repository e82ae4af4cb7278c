#pragma once
// Tokenizers: text to token ids and back.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/tokenizer_traits.h"

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
  /// Appends the same ids as encode(), returns the same number, and appends to `ends` the byte offset in
  /// `text` of the end of each token. A token begins where the one before it ends. Offsets never decrease;
  /// they may lie within a character that is divided among tokens (bytes).
  ///
  /// - Where the text is rewritten (NFC, rules of a sentencepiece model), the tokens that share a rewritten
  /// part
  ///   divide its bytes. If there are not enough of them, or if a token is a space that is added before the
  ///   text, it has no width: it belongs to the next token.
  /// - Spaces belong to their token. (`trim_offsets` of Hugging Face's tokenizers excludes spaces at the ends
  ///   of a token: text that begins with a space would lose its first token.)
  /// - Text without a token counts to the token after it; spaces that sentencepiece collapses to one count to
  ///   that one. Text after the last token is not covered.
  virtual int64_t encode_spans(std::string_view text, std::vector<int32_t>& ids,
                               std::vector<int64_t>& ends) const = 0;
  /// The text of the ids; special tokens (such as the end of a document) have none. Not valid UTF-8 if the
  /// ids end within a character. Throws Error (`data`) on an id outside [0, vocab_size()).
  virtual std::string decode(std::span<const int32_t> ids) const = 0;

  /// The largest id + 1. A model's vocabulary may be larger (padded).
  virtual int64_t vocab_size() const = 0;
  virtual std::optional<int32_t> bos() const = 0;
  /// The end-of-document token.
  virtual std::optional<int32_t> eos() const = 0;
  /// The id of a token by its text as the vocabulary spells it, special tokens included.
  virtual std::optional<int32_t> id_of(std::string_view token) const = 0;
  /// "bytes", "sentencepiece" or "hf".
  virtual std::string_view kind() const = 0;

  struct SpecialToken {
    std::string text;
    int32_t id = 0;
  };
  /// Tokens that are not text: added tokens marked special, control and unknown pieces, and the tokens of
  /// eos_ids() that the vocabulary has. By id.
  virtual std::vector<SpecialToken> special_token_list() const = 0;

  /// The special tokens by name ("bos_token", "eos_token", ...), as in transformers: of tokenizer_config.json
  /// and special_tokens_map.json beside the tokenizer; if there is neither, the tokenizer's own.
  const std::map<std::string, std::string>& special_tokens() const { return traits_.special_tokens; }
  /// The list `additional_special_tokens` of these files.
  const std::vector<std::string>& additional_special_tokens() const { return traits_.additional; }
  /// All tokens at which generation stops, in increasing order: eos_token_id of generation_config.json and of
  /// config.json beside the tokenizer, each a number or a list, and eos().
  std::vector<int32_t> eos_ids() const {
    std::vector<int32_t> ids = traits_.eos_ids;
    if (const auto own = eos()) ids.push_back(*own);
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
  }
  /// A chat template by name, such as "tool_use": of chat_template.jinja ("default") and
  /// chat_templates/NAME.jinja beside the tokenizer, else of tokenizer_config.json.
  std::optional<std::string> chat_template(const std::string& name = "default") const {
    const auto found = traits_.chat_templates.find(name);
    return found == traits_.chat_templates.end() ? std::nullopt : std::optional(found->second);
  }

  /// Why this tokenizer uses a slower method than others of its kind; empty if it does not.
  virtual std::string slow_reason() const { return {}; }

  using File = TokenizerFile;
  /// The files of this tokenizer for a model directory, for this and other programs. The first one is the
  /// file to load.
  /// The files beside the tokenizer come with it: tokenizer_config.json, special_tokens_map.json,
  /// chat_template.jinja and generation_config.json.
  virtual std::vector<File> files() const = 0;

 protected:
  Tokenizer() = default;
  explicit Tokenizer(TokenizerTraits traits) : traits_(std::move(traits)) {}

  TokenizerTraits traits_;
};

/// Ids 0 to 255 are bytes, 256 is the end of a document.
std::unique_ptr<Tokenizer> make_byte_tokenizer(TokenizerTraits traits = {});
/// Loads a sentencepiece model file, and the files beside it. In text, control pieces such as </s> are
/// ordinary text, as for the sentencepiece library. Throws Error: `no_input`, `data`.
std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path);
/// The same from the bytes of the file; `name` is for messages.
std::unique_ptr<Tokenizer> make_sentencepiece(std::string model, const std::string& name);
/// Loads a Hugging Face tokenizer.json with a BPE model; features without an exact equivalent are refused.
/// Added tokens are recognized in text. The names of the beginning and end tokens come from the files beside
/// it, else common names are tried. Throws Error: `no_input`, `data`.
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
