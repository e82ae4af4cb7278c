#include "core/config/value.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include <spdlog/fmt/fmt.h>

namespace nrl::config_detail {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// Length of "-?(0|[1-9][0-9]*)" at the start of `text`; 0 when there is none.
size_t integer_length(std::string_view text) {
  size_t i = text.starts_with('-') ? 1 : 0;
  if (i >= text.size() || !is_digit(text[i])) return 0;
  if (text[i] == '0') return i + 1;
  while (i < text.size() && is_digit(text[i])) ++i;
  return i;
}

/// Texts that need no quotes in YAML, flow lists included.
bool is_plain(std::string_view text) {
  if (text.empty() || is_null_text(text) || parse_boolean(text)) return false;
  if (is_digit(text[0]) || text[0] == '-' || text[0] == '.' || text[0] == '+') {
    if (parse_number(text) || parse_size(text)) return false;
    if (text[0] == '-' || text.starts_with("...")) return false;
  }
  return std::all_of(text.begin(), text.end(), [](char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '-' ||
           c == '.' || c == '/' || c == '+';
  });
}

}  // namespace

std::optional<int64_t> parse_integer(std::string_view text) {
  if (text.empty() || integer_length(text) != text.size()) return std::nullopt;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<int64_t> parse_size(std::string_view text) {
  const size_t n = integer_length(text);
  const auto value = parse_integer(text.substr(0, n));
  if (!value) return std::nullopt;
  const std::string_view suffix = text.substr(n);
  if (suffix.empty()) return value;
  struct Unit {
    std::string_view suffix;
    int64_t factor;
  };
  static constexpr Unit units[] = {{"k", 1000},   {"M", 1000000},   {"B", 1000000000},
                                   {"KiB", 1024}, {"MiB", 1048576}, {"GiB", 1073741824}};
  for (const Unit& unit : units) {
    int64_t product = 0;
    if (unit.suffix == suffix && !__builtin_mul_overflow(*value, unit.factor, &product)) return product;
  }
  return std::nullopt;
}

std::optional<double> parse_number(std::string_view text) {
  size_t i = integer_length(text);
  if (i == 0) return std::nullopt;
  if (i < text.size() && text[i] == '.') {
    const size_t begin = ++i;
    while (i < text.size() && is_digit(text[i])) ++i;
    if (i == begin) return std::nullopt;
  }
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    ++i;
    if (i < text.size() && (text[i] == '+' || text[i] == '-')) ++i;
    const size_t begin = i;
    while (i < text.size() && is_digit(text[i])) ++i;
    if (i == begin) return std::nullopt;
  }
  if (i != text.size()) return std::nullopt;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<bool> parse_boolean(std::string_view text) {
  if (text == "true" || text == "True" || text == "TRUE") return true;
  if (text == "false" || text == "False" || text == "FALSE") return false;
  return std::nullopt;
}

bool is_null_text(std::string_view text) {
  return text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL";
}

std::string number_text(double number) {
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, number).ptr;
  return {buffer, end};
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      (out += '\\') += c;
    else if (c == '\n')
      out += "\\n";
    else if (c == '\t')
      out += "\\t";
    else if (static_cast<unsigned char>(c) < 0x20)
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    else
      out += c;
  }
  return out + '"';
}

std::string yaml_string(std::string_view text) {
  return is_plain(text) ? std::string(text) : json_string(text);
}

namespace {
std::string text_of(const Value& value, std::string (*string_text)(std::string_view)) {
  struct Printer {
    std::string (*string_text)(std::string_view);
    std::string operator()(Null) const { return "null"; }
    std::string operator()(Auto) const { return "auto"; }
    std::string operator()(bool b) const { return b ? "true" : "false"; }
    std::string operator()(int64_t i) const { return std::to_string(i); }
    std::string operator()(double d) const { return number_text(d); }
    std::string operator()(const std::string& s) const { return string_text(s); }
    std::string operator()(const List& list) const {
      std::string out = "[";
      for (const Value& item : list) out += (out.size() > 1 ? ", " : "") + text_of(item, string_text);
      return out + "]";
    }
  };
  return std::visit(Printer{string_text}, value.v);
}
}  // namespace

std::string yaml_text(const Value& value) {
  return text_of(value, yaml_string);
}
std::string json_text(const Value& value) {
  return text_of(value, json_string);
}

}  // namespace nrl::config_detail
