#pragma once
// Splits a template into text and the tokens of its tags.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::data::chat {

/// A position in a template, counted from 1; columns are characters.
struct Place {
  uint32_t line = 1, column = 1;
};

/// Throws Error (Exit::data) "NAME:line:column: TEXT".
[[noreturn]] void fail_at(std::string_view name, Place place, std::string_view text);

struct Token {
  enum class Kind : uint8_t {
    text,
    variable_begin,
    variable_end,
    block_begin,
    block_end,
    name,
    string,
    integer,
    real,
    symbol,
    end
  } kind = Kind::end;
  Place at;
  std::string text;  ///< of a string: without quotes and escapes
  int64_t integer = 0;
  double real = 0;

  bool is(std::string_view symbol) const { return kind == Kind::symbol && text == symbol; }
  bool is_name(std::string_view word) const { return kind == Kind::name && text == word; }
};

/// The tokens of `source`, the last one of kind end. Applies Jinja's white space control with trim_blocks and
/// lstrip_blocks, and removes one newline at the end. Error (Exit::data) at a place of the template `name`.
std::vector<Token> tokens_of(std::string_view source, std::string_view name);

}  // namespace nrl::data::chat
