#include "apps/data/word_scanner.h"

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "apps/data/regex.h"
#include "apps/data/unicode.h"

namespace nrl::data {
namespace {

enum class Class : uint8_t { other, letter, number, space, unknown };

/// Class of every character up to U+FFFF, as the regular expressions have it.
class Classes {
 public:
  Classes() {
    std::string all;
    std::vector<size_t> offset(0x10000);
    for (uint32_t c = 0; c < 0x10000; ++c) {
      offset[c] = all.size();
      if (c < 0xD800 || c > 0xDFFF) append_utf8(all, c);
    }
    const std::pair<const char*, Class> patterns[] = {
        {"\\p{L}+", Class::letter}, {"\\p{N}+", Class::number}, {"\\s+", Class::space}};
    for (const auto& [pattern, value] : patterns) {
      const Regex regex(pattern, false, "");
      size_t begin = 0, end = 0;
      uint32_t c = 0;
      while (regex.find(all, end, begin, end))
        for (; c < 0x10000 && offset[c] < end; ++c)
          if (offset[c] >= begin) table_[c] = value;
    }
  }
  Class operator[](uint32_t c) const { return table_[c]; }

 private:
  std::array<Class, 0x10000> table_{};
};

const Classes& classes() {
  static const Classes instance;
  return instance;
}

/// Walks over the text; `at` is the current character.
struct Cursor {
  const Classes& table;
  const std::string_view text;

  uint8_t byte(size_t at) const { return at < text.size() ? static_cast<uint8_t>(text[at]) : uint8_t{0}; }

  // The class of the character at `at` < text.size(), and its end.
  Class next(size_t at, size_t& end) const {
    const uint8_t first = byte(at);
    if (first < 0x80) {
      end = at + 1;
      return table[first];
    }
    if (first >= 0xF0) return Class::unknown;
    end = at;
    return table[next_character(text, end)];
  }
  // Skips at most `limit` characters of a class. Returns whether the character after them is known.
  bool skip(Class wanted, size_t& at, size_t limit = SIZE_MAX) const {
    size_t end = at;
    for (; at < text.size() && limit > 0; at = end, --limit)
      if (const Class own = next(at, end); own != wanted) return own != Class::unknown;
    return true;
  }
};

// The end of a contraction such as 's at an apostrophe; `begin` if there is none.
size_t contraction_end(const Cursor& cursor, size_t begin, bool any_case) {
  const auto letter = [&](size_t at) {
    const uint8_t byte = cursor.byte(at);
    return static_cast<char>(any_case && byte >= 'A' && byte <= 'Z' ? byte + 32 : byte);
  };
  const char first = letter(begin + 1), second = first == 0 ? '\0' : letter(begin + 2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return begin + 2;
  const bool two =
      (first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l');
  return two ? begin + 3 : begin;
}

}  // namespace

std::optional<WordScanner> WordScanner::of(std::string_view pattern) {
  if (pattern == gpt2_pattern) return WordScanner(true, SIZE_MAX);
  if (pattern == llama3_pattern) return WordScanner(false, 3);
  if (pattern == qwen2_pattern) return WordScanner(false, 1);
  return std::nullopt;
}

size_t WordScanner::match(std::string_view text, size_t begin) const {
  const Cursor cursor{classes(), text};
  size_t at = begin, next = begin;
  const auto found = [&](bool known) { return known ? at : 0; };

  if (text[begin] == '\'') {
    // Without case, two letters that are not ASCII equal s and k.
    if (!gpt2_ && (cursor.byte(begin + 1) >= 0x80 || cursor.byte(begin + 2) >= 0x80)) return 0;
    if (const size_t end = contraction_end(cursor, begin, !gpt2_); end > begin) return end;
  }
  const bool blank = text[begin] == ' ';
  Class first = cursor.next(begin, next);
  if (first == Class::unknown) return 0;
  // The first character of the word after a character that may precede it.
  Class second = Class::space;
  size_t after = next;
  if (next < text.size() && (second = cursor.next(next, after)) == Class::unknown) return 0;

  const bool line_end = text[begin] == '\r' || text[begin] == '\n';
  const bool may_precede_letters = gpt2_ ? blank : !line_end && first != Class::number;
  if (first == Class::letter || (second == Class::letter && may_precede_letters)) {
    at = first == Class::letter ? next : after;
    return found(cursor.skip(Class::letter, at));
  }
  if (first == Class::number || (gpt2_ && blank && second == Class::number)) {
    at = first == Class::number ? next : after;
    return found(cursor.skip(Class::number, at, digits_ - 1));
  }
  if (first == Class::other || (blank && second == Class::other)) {
    at = first == Class::other ? next : after;
    if (!cursor.skip(Class::other, at)) return 0;
    if (!gpt2_)
      while (cursor.byte(at) == '\r' || cursor.byte(at) == '\n') ++at;
    return at;
  }
  at = next;
  if (!cursor.skip(Class::space, at)) return 0;
  if (!gpt2_)
    if (const size_t line = text.substr(begin, at - begin).find_last_of("\r\n"); line != text.npos)
      return begin + line + 1;
  if (at == text.size()) return at;
  // The last space belongs to the next word.
  size_t last = at - 1;
  while ((static_cast<uint8_t>(text[last]) & 0xC0) == 0x80) --last;
  return last > begin ? last : at;
}

}  // namespace nrl::data
