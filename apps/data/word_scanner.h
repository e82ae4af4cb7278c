#pragma once
// Splits text into words as the patterns of GPT-2, Llama 3 and Qwen 2 do, several times faster than a regular
// expression.

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>

namespace nrl::data {

/// Pattern of GPT-2, for the ByteLevel pre-tokenizer.
inline constexpr std::string_view gpt2_pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
/// Pattern of Llama 3.
inline constexpr std::string_view llama3_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+)"
    R"(|\s+(?!\S)|\s+)";
/// Pattern of Qwen 2, which takes digits one by one.
inline constexpr std::string_view qwen2_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+)"
    R"(|\s+(?!\S)|\s+)";

/// Finds the matches of one of these patterns. Thread-safe.
class WordScanner {
 public:
  /// Unset for any other pattern.
  static std::optional<WordScanner> of(std::string_view pattern);

  /// End of the match that begins at `begin` < text.size(), in valid UTF-8 text; 0 if it takes the regular
  /// expression: the match meets a character above U+FFFF, or a non-ASCII character after an apostrophe.
  size_t match(std::string_view text, size_t begin) const;

 private:
  explicit WordScanner(bool gpt2, size_t digits) : gpt2_(gpt2), digits_(digits) {}

  bool gpt2_;
  size_t digits_;  // most digits of a number
};

}  // namespace nrl::data
