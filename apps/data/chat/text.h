#pragma once
// Python's str methods on UTF-8: lengths and indices count code points.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::data::chat {

/// At least the number of characters that may end a word or a line.
size_t most_breaks(std::string_view text);

/// True for the characters of str.isspace().
bool is_python_space(char32_t c);

/// Code points of valid UTF-8.
size_t code_points(std::string_view text);

/// Byte offset of code point `index`; the size of the text if there are fewer.
size_t byte_of(std::string_view text, size_t index);

enum class Side : uint8_t { left = 1, right = 2, both = 3 };

/// Removes white space.
std::string_view strip(std::string_view text, Side side);
/// Removes the characters of `chars`.
std::string_view strip(std::string_view text, std::string_view chars, Side side);

/// str.split() and str.rsplit() at white space. `most` < 0: no limit.
std::vector<std::string_view> split_at_spaces(std::string_view text, int64_t most, bool from_right);
/// str.split(separator) and str.rsplit(separator); the separator must not be empty.
std::vector<std::string_view> split(std::string_view text, std::string_view separator, int64_t most,
                                    bool from_right);
/// str.splitlines().
std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends);

/// str.replace(). `most` < 0: no limit.
std::string replace(std::string_view text, std::string_view old, std::string_view by, int64_t most);

/// Occurrences that do not overlap; the empty text occurs around every code point.
size_t count(std::string_view text, std::string_view part);

/// str.capitalize(): the first character in title case, the others in lower case.
std::string capitalize(std::string_view text);
/// Filter title: words begin after white space and any of -({[<.
std::string title_words(std::string_view text);
/// Method title: a letter after another one is in lower case, any other in title case.
std::string title_letters(std::string_view text);

/// Text with &, <, >, ' and " as HTML entities, like markupsafe.
std::string escape_html(std::string_view text);

}  // namespace nrl::data::chat
