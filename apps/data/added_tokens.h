#pragma once
// Added tokens (such as special tokens), which are matched in the text before the model encodes the rest.

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/unicode.h"

namespace nrl::data {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool strip_left = false, strip_right = false;
};

/// Property White_Space of the Unicode Character Database.
inline bool is_space(char32_t c) {
  return c == ' ' || (c >= 9 && c <= 13) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

/// Finds tokens in valid UTF-8 text: the leftmost match, and of several at one position the longest.
class AddedTokens {
 public:
  void add(AddedToken token) {
    if (token.content.empty()) return;  // its normalized text is empty
    is_first_[static_cast<uint8_t>(token.content[0])] = true;
    auto& list = by_first_[static_cast<uint8_t>(token.content[0])];
    const auto shorter = [&](const AddedToken& o) { return o.content.size() < token.content.size(); };
    list.insert(std::find_if(list.begin(), list.end(), shorter), std::move(token));
    any_ = true;
  }

  /// True if a token begins with this byte.
  bool may_begin(char first) const { return is_first_[static_cast<uint8_t>(first)]; }
  /// The next byte from `at` on that is the first one of a token, or the size of the text.
  size_t next_first(std::string_view text, size_t at) const {
    const auto first = [&](size_t i) { return is_first_[static_cast<uint8_t>(text[i])]; };
    while (at + 4 <= text.size() && !(first(at) | first(at + 1) | first(at + 2) | first(at + 3))) at += 4;
    while (at < text.size() && !first(at)) ++at;
    return at;
  }
  /// The longest token at the beginning of a text; null if there is none.
  const AddedToken* match(std::string_view text) const {
    if (text.empty()) return nullptr;
    for (const AddedToken& token : by_first_[static_cast<uint8_t>(text[0])])
      if (text.starts_with(token.content)) return &token;
    return nullptr;
  }

  /// Calls gap(begin, end) for the (possibly empty) text between tokens, and found(id, end) for each token
  /// with the end of its text, spaces that it strips included.
  template <class Gap, class Found>
  void split(std::string_view text, Gap&& gap, Found&& found) const {
    size_t done = 0;
    for (size_t at = 0; any_ && at < text.size();) {
      at = next_first(text, at);
      if (at == text.size()) break;
      const AddedToken* const token = match(text.substr(at));
      if (!token) {
        ++at;
        continue;
      }
      size_t begin = at, end = at + token->content.size();
      if (token->strip_left) begin = space_before(text, done, begin);
      if (token->strip_right) end = space_after(text, end);
      gap(done, begin);
      found(token->id, end);
      done = at = end;
    }
    gap(done, text.size());
  }

 private:
  static size_t space_after(std::string_view text, size_t at) {
    for (size_t next = at; next < text.size() && is_space(next_character(text, next));) at = next;
    return at;
  }
  static size_t space_before(std::string_view text, size_t limit, size_t at) {
    while (at > limit) {
      size_t begin = at - 1;
      while (begin > limit && (static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) --begin;
      size_t cursor = begin;
      if (!is_space(next_character(text, cursor))) break;
      at = begin;
    }
    return at;
  }

  std::array<std::vector<AddedToken>, 256> by_first_;
  std::array<bool, 256> is_first_{};
  bool any_ = false;
};

}  // namespace nrl::data
