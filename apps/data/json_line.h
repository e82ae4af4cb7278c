#pragma once
// Reads one text out of a line of JSON without making values of the others.

#include <optional>
#include <string>
#include <string_view>

namespace nrl::data {

/// The text under `key` of `line`, if the line is a JSON object that needs no closer look: strings, plain
/// numbers, true, false and null as members, a small number of them, all keys different, none nested, and a
/// text under `key`. Then parse_json() gives the same text; anything else, errors included, is left to it.
/// `line` must be valid UTF-8 without NUL bytes.
std::optional<std::string> text_of_plain_line(std::string_view line, std::string_view key);

}  // namespace nrl::data
