#pragma once
// Translates Oniguruma patterns (Ruby syntax), which Hugging Face's tokenizers use, to PCRE2, and handles
// characters that are newer than PCRE2's Unicode tables.

#include <string>
#include <string_view>

namespace nrl::data {

/// Replaces every character whose general category is newer than Unicode 14.0, up to 16.0, by an older one of
/// the same category, script (Han, Hiragana, Katakana, Bopomofo, Hangul) and number of bytes, so that any
/// PCRE2 classifies it like Unicode 16.0. `text` must be valid UTF-8. Returns false, with `out` unchanged, if
/// there is no such character.
bool replace_new_characters(std::string_view text, std::string& out);

struct OnigurumaPattern {
  std::string pcre;          ///< for PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE
  bool has_classes = false;  ///< must be matched against replace_new_characters(text)
};

/// Throws Error (`data`), beginning with `where`, for syntax without an exact equivalent, e.g. nested sets.
OnigurumaPattern from_oniguruma(const std::string& pattern, const std::string& where);

}  // namespace nrl::data
