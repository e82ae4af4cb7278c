#pragma once
// Patterns of Oniguruma (Ruby syntax), which Hugging Face's tokenizers use, for PCRE2; and characters that
// are newer than PCRE2's tables.

#include <string>
#include <string_view>

namespace nrl::data {

/// Replaces every character whose general category is newer than Unicode 14.0, up to 16.0, by an older one of
/// the same category, script (Han, Hiragana, Katakana, Bopomofo, Hangul) and number of bytes, so that any
/// PCRE2 classifies it as Unicode 16.0 does. False, with `out` untouched, when there is none in valid UTF-8.
bool replace_new_characters(std::string_view text, std::string& out);

struct OnigurumaPattern {
  std::string pcre;          ///< for PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE
  bool has_classes = false;  ///< must be matched against replace_new_characters(text)
};

/// Throws Error (`data`) beginning with `where` for what has no exact equivalent, e.g. sets within sets.
OnigurumaPattern from_oniguruma(const std::string& pattern, const std::string& where);

}  // namespace nrl::data
