#include "apps/data/chat/text.h"

#include <algorithm>

#include "apps/data/added_tokens.h"
#include "apps/data/unicode.h"

namespace nrl::data::chat {
namespace {

bool is_continuation(char byte) {
  return (static_cast<uint8_t>(byte) & 0xC0) == 0x80;
}

size_t begin_of_last(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && is_continuation(text[at])) --at;
  return at;
}

bool has(Side side, Side which) {
  return (static_cast<int>(side) & static_cast<int>(which)) != 0;
}

template <class Removed>
std::string_view strip_if(std::string_view text, Side side, Removed&& removed) {
  if (has(side, Side::left)) {
    size_t at = 0;
    for (size_t next = 0; next < text.size() && removed(next_character(text, next)); at = next) {
    }
    text.remove_prefix(at);
  }
  while (has(side, Side::right) && !text.empty()) {
    const size_t begin = begin_of_last(text);
    size_t cursor = begin;
    if (!removed(next_character(text, cursor))) break;
    text = text.substr(0, begin);
  }
  return text;
}

bool ends_line(char32_t c) {
  return (c >= '\n' && c <= '\r') || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

}  // namespace

size_t most_breaks(std::string_view text) {
  size_t found = 0;
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    found += byte <= ' ' || byte == 0xC2 || (byte >= 0xE1 && byte <= 0xE3);  // first bytes of white space
  }
  return found;
}

bool is_python_space(char32_t c) {
  return is_space(c) || (c >= 0x1C && c <= 0x1F);
}

size_t code_points(std::string_view text) {
  size_t continued = 0;
  for (const char byte : text) continued += is_continuation(byte);
  return text.size() - continued;
}

size_t byte_of(std::string_view text, size_t index) {
  for (size_t at = 0; at < text.size(); ++at)
    if (!is_continuation(text[at]) && index-- == 0) return at;
  return text.size();
}

std::string_view strip(std::string_view text, Side side) {
  return strip_if(text, side, is_python_space);
}

std::string_view strip(std::string_view text, std::string_view chars, Side side) {
  return strip_if(text, side, [&](char32_t c) {
    if (c < 0x80) return chars.find(static_cast<char>(c)) != std::string_view::npos;
    std::string encoded;
    append_utf8(encoded, c);
    return chars.find(encoded) != std::string_view::npos;
  });
}

std::vector<std::string_view> split_at_spaces(std::string_view text, int64_t most, bool from_right) {
  std::vector<std::string_view> parts;
  const Side outer = from_right ? Side::right : Side::left;
  for (text = strip(text, outer); !text.empty(); text = strip(text, outer)) {
    if (most >= 0 && static_cast<int64_t>(parts.size()) == most) {
      parts.push_back(text);
      break;
    }
    size_t begin = 0, end = text.size();
    if (from_right) {
      begin = end;
      while (begin > 0) {
        const size_t before = begin_of_last(text.substr(0, begin));
        size_t cursor = before;
        if (is_python_space(next_character(text, cursor))) break;
        begin = before;
      }
    } else {
      end = 0;
      for (size_t next = 0; next < text.size() && !is_python_space(next_character(text, next));) end = next;
    }
    parts.push_back(text.substr(begin, end - begin));
    text = from_right ? text.substr(0, begin) : text.substr(end);
  }
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> split(std::string_view text, std::string_view separator, int64_t most,
                                    bool from_right) {
  std::vector<std::string_view> parts;
  while (most < 0 || static_cast<int64_t>(parts.size()) < most) {
    const size_t at = from_right ? text.rfind(separator) : text.find(separator);
    if (at == std::string_view::npos) break;
    const size_t after = at + separator.size();
    parts.push_back(from_right ? text.substr(after) : text.substr(0, at));
    text = from_right ? text.substr(0, at) : text.substr(after);
  }
  parts.push_back(text);
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = at;
    const char32_t c = next_character(text, at);
    if (!ends_line(c)) continue;
    if (c == '\r' && at < text.size() && text[at] == '\n') ++at;
    lines.push_back(text.substr(begin, (keep_ends ? at : end) - begin));
    begin = at;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

std::string replace(std::string_view text, std::string_view old, std::string_view by, int64_t most) {
  std::string result;
  if (old.empty()) {
    // Before every code point and at the end.
    size_t at = 0;
    for (int64_t done = 0; most < 0 || done < most; ++done) {
      result += by;
      if (at == text.size()) return result;
      const size_t begin = at;
      next_character(text, at);
      result += text.substr(begin, at - begin);
    }
    return result += text.substr(at);
  }
  size_t at = 0;
  for (int64_t done = 0; most < 0 || done < most; ++done) {
    const size_t found = text.find(old, at);
    if (found == std::string_view::npos) break;
    result += text.substr(at, found - at);
    result += by;
    at = found + old.size();
  }
  return result += text.substr(at);
}

size_t count(std::string_view text, std::string_view part) {
  if (part.empty()) return code_points(text) + 1;
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + part.size()))
    ++found;
  return found;
}

std::string capitalize(std::string_view text) {
  if (text.empty()) return {};
  size_t first = 0;
  next_character(text, first);
  // The whole text decides on the form of a final sigma.
  const std::string lower = to_lower(text);
  const std::string lower_first = to_lower(text.substr(0, first));
  return to_title(text.substr(0, first)) + lower.substr(lower_first.size());
}

std::string title_words(std::string_view text) {
  std::string result;
  const auto separates = [](char32_t c) {
    return is_python_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
  };
  for (size_t at = 0; at < text.size();) {
    size_t begin = at, next = at;
    const bool separator = separates(next_character(text, next));
    const size_t first = next;
    for (at = next; next < text.size() && separates(next_character(text, next)) == separator;) at = next;
    result += to_upper(text.substr(begin, first - begin));
    result += to_lower(text.substr(first, at - first));
  }
  return result;
}

std::string title_letters(std::string_view text) {
  std::string result;
  bool after_letter = false;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_character(text, at);
    const std::string_view letter = text.substr(begin, at - begin);
    result += after_letter ? to_lower(letter) : to_title(letter);
    after_letter = is_cased(c);
  }
  return result;
}

std::string escape_html(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '\'':
        result += "&#39;";
        break;
      case '"':
        result += "&#34;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

}  // namespace nrl::data::chat
