#pragma once
// Files beside a tokenizer: names of special tokens, end tokens, chat templates.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace nrl::data {

/// A file of a tokenizer.
struct TokenizerFile {
  std::string name;  ///< in a model directory: "tokenizer.json", "tokenizer.model", ...
  std::string content;
  bool derived = false;  ///< derived from the other files, for other programs
};

/// The content of the files beside a tokenizer.
struct TokenizerTraits {
  std::vector<TokenizerFile> files;                   ///< as they are
  std::map<std::string, std::string> special_tokens;  ///< by name
  std::vector<std::string> additional;                ///< special tokens without a name
  std::map<std::string, std::string> chat_templates;  ///< by name
  std::vector<int32_t> eos_ids;
  bool named = false;        ///< a file names the special tokens
  std::string derived_from;  ///< kind of tokenizer from which this program derived tokenizer_config.json
};

/// Reads the files beside a tokenizer: `stem` + "tokenizer_config.json" and so on, e.g. the stem
/// "DIRECTORY/". Missing files are fine. Throws Error: `data` with the position in a malformed file.
TokenizerTraits read_tokenizer_traits(const std::string& stem);

/// Adds files from beside a tokenizer to `all`; they replace derived ones of the same name.
void carry(const std::vector<TokenizerFile>& files, std::vector<TokenizerFile>& all);

}  // namespace nrl::data
