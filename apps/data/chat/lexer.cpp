#include "apps/data/chat/lexer.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <utility>

#include "apps/data/chat/text.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data::chat {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool is_name_character(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

/// All line ends as \n, without one at the end of the text.
std::string with_plain_newlines(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      text += source[i];
      continue;
    }
    text += '\n';
    if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

class Lexer {
 public:
  Lexer(std::string_view source, std::string_view name)
      : source_(with_plain_newlines(source)), all_(source_), name_(name) {}

  std::vector<Token> run() {
    while (at_ < all_.size()) next_text();
    push(Token::Kind::end, at_);
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail_here(std::string_view text, size_t at) { fail_at(name_, place(at), text); }

  // Positions are asked for in order, but for errors.
  Place place(size_t at) {
    if (at < counted_) {
      counted_ = 0;
      place_ = {};
    }
    for (; counted_ < at; ++counted_) {
      if (all_[counted_] == '\n') {
        ++place_.line;
        place_.column = 1;
      } else if ((static_cast<uint8_t>(all_[counted_]) & 0xC0) != 0x80) {
        ++place_.column;
      }
    }
    return place_;
  }

  Token& push(Token::Kind kind, size_t at, std::string_view text = {}) {
    Token token;
    token.kind = kind;
    token.at = place(std::min(at, all_.size()));
    token.text = text;
    return tokens_.emplace_back(std::move(token));
  }

  bool starts(size_t at, std::string_view text) const {
    return all_.substr(std::min(at, all_.size())).starts_with(text);
  }

  size_t after_spaces(size_t at) const { return all_.size() - strip(all_.substr(at), Side::left).size(); }

  // Moves behind a tag; the next text begins a line if the tag's last character ends one.
  void move_to(size_t end) {
    at_ = end;
    line_starts_ = at_ > 0 && all_[at_ - 1] == '\n';
  }

  // The text before a tag without the white space that the tag removes.
  std::string_view trimmed(std::string_view text, char sign, bool is_variable) const {
    if (sign == '-') return strip(text, Side::right);
    if (sign == '+' || is_variable) return text;
    const size_t newline = text.rfind('\n');
    const size_t line = newline == std::string_view::npos ? 0 : newline + 1;
    if (line == 0 && !line_starts_) return text;
    return strip(text.substr(line), Side::left).empty() ? text.substr(0, line) : text;
  }

  char sign_at(size_t at) const {
    return at < all_.size() && (all_[at] == '-' || all_[at] == '+') ? all_[at] : 0;
  }

  // The end of "WORD %}" at `at`, with white space around; nullopt for anything else.
  std::optional<size_t> end_of_word_tag(size_t at, std::string_view word, bool trims_newline) const {
    at = after_spaces(at);
    if (!starts(at, word)) return std::nullopt;
    return end_of_tag(after_spaces(at + word.size()), "%}", trims_newline, trims_newline);
  }

  // The end of a closing mark at `at`, with the white space that it removes.
  std::optional<size_t> end_of_tag(size_t at, std::string_view mark, bool trims_newline, bool plus) const {
    if (starts(at, "-") && starts(at + 1, mark)) return after_spaces(at + 1 + mark.size());
    if (plus && starts(at, "+") && starts(at + 1, mark)) return at + 1 + mark.size();
    if (!starts(at, mark)) return std::nullopt;
    const size_t end = at + mark.size();
    return trims_newline && starts(end, "\n") ? end + 1 : end;
  }

  void push_text(std::string_view text) {
    if (!text.empty()) push(Token::Kind::text, static_cast<size_t>(text.data() - all_.data()), text);
  }

  void next_text() {
    size_t tag = at_;
    do {
      tag = all_.find('{', tag);
      if (tag == std::string_view::npos) {
        push_text(all_.substr(at_));
        at_ = all_.size();
        return;
      }
    } while (!starts(tag, "{{") && !starts(tag, "{%") && !starts(tag, "{#") && ++tag);
    const char kind = all_[tag + 1];
    const char sign = sign_at(tag + 2);
    const size_t inside = tag + 2 + (sign != 0);
    push_text(trimmed(all_.substr(at_, tag - at_), sign, kind == '{'));
    if (kind == '#') return skip_comment(tag, inside);
    if (kind == '%') {
      if (const auto end = end_of_word_tag(inside, "raw", false)) return read_raw(tag, *end);
    }
    push(kind == '{' ? Token::Kind::variable_begin : Token::Kind::block_begin, tag);
    at_ = inside;
    read_tag(tag, kind == '{');
  }

  void skip_comment(size_t tag, size_t inside) {
    const size_t mark = all_.find("#}", inside);
    if (mark == std::string_view::npos) fail_here("the comment has no end; expected #}", tag);
    const bool signs = mark > inside && sign_at(mark - 1) != 0;
    move_to(*end_of_tag(signs ? mark - 1 : mark, "#}", true, true));
  }

  void read_raw(size_t tag, size_t begin) {
    move_to(begin);
    for (size_t end = all_.find("{%", begin); end != std::string_view::npos; end = all_.find("{%", end + 1)) {
      const char sign = sign_at(end + 2);
      const auto after = end_of_word_tag(end + 2 + (sign != 0), "endraw", true);
      if (!after) continue;
      push_text(trimmed(all_.substr(begin, end - begin), sign, false));
      return move_to(*after);
    }
    fail_here("the raw block has no end; expected {% endraw %}", tag);
  }

  void read_tag(size_t tag, bool is_variable) {
    std::string open;  // closing brackets that are missing
    while (at_ < all_.size()) {
      if (open.empty()) {
        const auto end =
            is_variable ? end_of_tag(at_, "}}", false, false) : end_of_tag(at_, "%}", true, true);
        if (end) {
          push(is_variable ? Token::Kind::variable_end : Token::Kind::block_end, at_);
          return move_to(*end);
        }
      }
      if (const size_t end = after_spaces(at_); end != at_) {
        at_ = end;
      } else if (is_digit(all_[at_])) {
        read_number();
      } else if (is_name_character(all_[at_])) {
        size_t last = at_;
        while (last < all_.size() && is_name_character(all_[last])) ++last;
        push(Token::Kind::name, at_, all_.substr(at_, last - at_));
        at_ = last;
      } else if (all_[at_] == '\'' || all_[at_] == '"') {
        read_string();
      } else {
        read_symbol(open);
      }
    }
    fail_here(
        is_variable ? "the expression has no end; expected }}" : "the statement has no end; expected %}",
        tag);
  }

  // Digits with single underscores between them.
  size_t after_digits(size_t at) const {
    while (at < all_.size() && (is_digit(all_[at]) || (all_[at] == '_' && at + 1 < all_.size() &&
                                                       is_digit(all_[at + 1]) && is_digit(all_[at - 1]))))
      ++at;
    return at;
  }

  void read_number() {
    const size_t begin = at_;
    int base = 10;
    size_t end = after_digits(at_);
    bool is_real = false;
    if (all_[begin] == '0' && begin + 2 < all_.size()) {
      const char mark = static_cast<char>(all_[begin + 1] | 0x20);
      base = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 10;
    }
    if (base != 10) {
      end = begin + 2;
      while (end < all_.size() && is_name_character(all_[end])) ++end;
    } else {
      const bool after_dot = begin > 0 && all_[begin - 1] == '.';
      if (!after_dot && end + 1 < all_.size() && all_[end] == '.' && is_digit(all_[end + 1])) {
        end = after_digits(end + 1);
        is_real = true;
      }
      if (!after_dot && end < all_.size() && (all_[end] | 0x20) == 'e') {
        const size_t digits = end + 1 + (sign_at(end + 1) != 0);
        if (digits < all_.size() && is_digit(all_[digits])) {
          end = after_digits(digits);
          is_real = true;
        }
      }
    }
    std::string text(all_.substr(begin, end - begin));
    std::erase(text, '_');
    Token& token = push(is_real ? Token::Kind::real : Token::Kind::integer, begin, text);
    const char* const first = text.data() + (base == 10 ? 0 : 2);
    const char* const last = text.data() + text.size();
    auto result = is_real ? std::from_chars(first, last, token.real)
                          : std::from_chars(first, last, token.integer, base);
    if (is_real && result.ec == std::errc::result_out_of_range) {
      token.real = std::strtod(text.c_str(), nullptr);  // infinity or zero
      result.ec = {};
    }
    if (result.ec != std::errc() || result.ptr != last ||
        (base == 10 && !is_real && text.size() > 1 && text[0] == '0'))
      fail_here("the number cannot be read", begin);
    at_ = end;
  }

  void read_string() {
    const size_t begin = at_;
    const char quote = all_[at_++];
    std::string text;
    while (at_ < all_.size() && all_[at_] != quote) {
      if (all_[at_] == '\\')
        read_escape(text, begin);
      else
        text += all_[at_++];
    }
    if (at_ >= all_.size()) fail_here("the string has no end", begin);
    ++at_;
    push(Token::Kind::string, begin, text);
  }

  void read_escape(std::string& text, size_t begin) {
    constexpr std::string_view plain = "\\'\"abfnrtv", meaning = "\\'\"\a\b\f\n\r\t\v";
    if (++at_ >= all_.size()) fail_here("the string has no end", begin);
    const char c = all_[at_];
    if (const size_t known = plain.find(c); known != std::string_view::npos) {
      text += meaning[known];
      ++at_;
    } else if (c == '\n') {
      ++at_;
    } else if (c >= '0' && c <= '7') {
      char32_t code = 0;
      for (int i = 0; i < 3 && at_ < all_.size() && all_[at_] >= '0' && all_[at_] <= '7'; ++i)
        code = code * 8 + static_cast<char32_t>(all_[at_++] - '0');
      append_utf8(text, code);
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
      const std::string_view hex = all_.substr(std::min(at_ + 1, all_.size())).substr(0, digits);
      uint32_t code = 0;
      const auto result = std::from_chars(hex.data(), hex.data() + hex.size(), code, 16);
      if (hex.size() != digits || result.ec != std::errc() || result.ptr != hex.data() + digits ||
          code > 0x10FFFF || (code >= 0xD800 && code < 0xE000))
        fail_here("the escape is not a character", at_ - 1);
      append_utf8(text, code);
      at_ += 1 + digits;
    } else if (c == 'N') {
      fail_here("escapes with names of characters are not supported", at_ - 1);
    } else if (static_cast<uint8_t>(c) < 0x80) {
      text += '\\';
      text += c;
      ++at_;
    } else {
      // Jinja decodes the ASCII form of the string, in which this character is an escape after a backslash.
      const char32_t code = next_character(all_, at_);
      text += code <= 0xFF     ? fmt::format("\\x{:02x}", static_cast<uint32_t>(code))
              : code <= 0xFFFF ? fmt::format("\\u{:04x}", static_cast<uint32_t>(code))
                               : fmt::format("\\U{:08x}", static_cast<uint32_t>(code));
    }
  }

  void read_symbol(std::string& open) {
    constexpr std::array<std::string_view, 6> pairs = {"//", "**", "==", "!=", ">=", "<="};
    constexpr std::string_view singles = "+-/*%~[](){}><=.:|,;";
    const std::string_view two = all_.substr(at_, 2);
    std::string_view symbol = all_.substr(at_, 1);
    if (std::find(pairs.begin(), pairs.end(), two) != pairs.end())
      symbol = two;
    else if (singles.find(symbol[0]) == std::string_view::npos)
      fail_here("unexpected character in an expression", at_);
    const char c = symbol[0];
    if (c == '{') open += '}';
    if (c == '(') open += ')';
    if (c == '[') open += ']';
    if (c == '}' || c == ')' || c == ']') {
      if (open.empty() || open.back() != c) fail_here(fmt::format("unexpected '{}'", c), at_);
      open.pop_back();
    }
    push(Token::Kind::symbol, at_, symbol);
    at_ += symbol.size();
  }

  const std::string source_;
  const std::string_view all_, name_;
  size_t at_ = 0, counted_ = 0;
  Place place_;
  bool line_starts_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

void fail_at(std::string_view name, Place place, std::string_view text) {
  fail(Exit::data, "{}:{}:{}: {}", name, place.line, place.column, text);
}

std::vector<Token> tokens_of(std::string_view source, std::string_view name) {
  return Lexer(source, name).run();
}

}  // namespace nrl::data::chat
