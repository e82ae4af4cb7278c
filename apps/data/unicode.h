#pragma once
// UTF-8, Unicode normalization form C and letter case.

#include <cstdint>
#include <string>
#include <string_view>

#include "apps/data/offset_map.h"

namespace nrl::data {

/// U+2581, which stands for a space in the pieces of sentencepiece.
inline constexpr std::string_view space_mark = "\u2581";

/// The offset of the first byte that is not part of valid UTF-8 (RFC 3629: no overlong forms, no
/// surrogates), or npos.
size_t find_invalid_utf8(std::string_view text);

/// Throws Error (`data`) naming the first such byte, if any.
void require_utf8(std::string_view text);

/// Decodes the character at `at` of valid UTF-8 and advances `at`.
char32_t next_character(std::string_view text, size_t& at);

/// Appends a character as UTF-8.
void append_utf8(std::string& out, char32_t c);

/// The text in normalization form C (UAX #15), like Hugging Face's tokenizers: characters newer than
/// Unicode 9.0 are unchanged. `text` must be valid UTF-8.
/// With `map`, adds the parts that change.
std::string to_nfc(std::string_view text, OffsetMap* map = nullptr);

/// The text in upper or lower case, with the full mappings of every language (UAX #44): U+00DF gives SS.
/// `text` must be valid UTF-8.
std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);

/// One character in title case.
std::string to_title(std::string_view character);

/// Property Cased: letters of lower, upper and title case.
bool is_cased(char32_t c);

/// True for a space and for every character that is not a separator, a control, or without a meaning.
bool is_printable(char32_t c);

}  // namespace nrl::data
