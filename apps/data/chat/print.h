#pragma once
// Text of values: Python's str() and repr(), and json.dumps().

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "apps/data/chat/value.h"

namespace nrl::data::chat {

/// Most bytes of a text that a template makes.
inline constexpr size_t most_text = size_t{64} << 20;

/// Throws Error (Exit::data) for a text of this many bytes, if these are too many.
void check_text(size_t bytes);

/// Appends Python's str(value); nothing for an undefined value.
void print(std::string& out, const Value& value);

/// Appends Python's repr(value).
void print_repr(std::string& out, const Value& value, int depth = 0);

/// Parameters of json.dumps(); `indent` is the text of one level, or absent for one line.
struct JsonStyle {
  std::optional<std::string> indent;
  std::string_view item_separator = ", ", key_separator = ": ";
  bool sort_keys = false, ensure_ascii = false;
};

/// Appends json.dumps(value). Error (Exit::data) with Python's message for values that JSON does not have.
void print_json(std::string& out, const Value& value, const JsonStyle& style, Budget& budget, int depth = 0);

/// The message of the error that the use of an undefined value is, as Jinja words it.
std::string missing_text(const Value& undefined);

}  // namespace nrl::data::chat
