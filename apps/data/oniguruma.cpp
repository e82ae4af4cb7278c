#include "apps/data/oniguruma.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data {
namespace {

struct StandIn {
  char32_t first, last, stand_in;
};
#include "apps/data/stand_ins.inc"

const StandIn* stand_in_of(char32_t c) {
  const auto* row = std::lower_bound(std::begin(stand_in_table), std::end(stand_in_table), c,
                                     [](const StandIn& r, char32_t value) { return r.last < value; });
  return row != std::end(stand_in_table) && row->first <= c ? row : nullptr;
}

// Bit c / 64 is set if one of these 64 characters is in the table. Small enough to stay in the cache.
class Filter {
 public:
  Filter() : bits_((0x110000 >> 6) / 8 + 1, 0) {
    for (const StandIn& row : stand_in_table)
      for (char32_t block = row.first >> 6; block <= row.last >> 6; ++block)
        bits_[block >> 3] = static_cast<uint8_t>(bits_[block >> 3] | 1u << (block & 7));
  }
  bool may_have(char32_t c) const { return bits_[c >> 9] >> (c >> 6 & 7) & 1; }

 private:
  std::vector<uint8_t> bits_;
};

// Oniguruma's \\w, which includes superscript digits, fractions, and enclosed letters.
constexpr std::string_view word_class =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\xB2\\xB3\\xB9\\xBC-\\xBE\\x{24B6}-\\x{24E9}\\x{1F130}-\\x{1F149}"
    "\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}";
constexpr std::string_view hex_digit_class = "0-9A-Fa-f";

class Translator {
 public:
  Translator(const std::string& pattern, const std::string& where) : in_(pattern), where_(where) {}

  OnigurumaPattern run() {
    while (at_ < in_.size()) step();
    if (in_set_) refuse("a set without an end");
    if (result_.has_classes) require_equal_treatment();
    return result_;
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    fail(Exit::data, "{}unsupported pattern '{}': {} is not supported", where_, in_, what);
  }
  bool next_is(std::string_view text) const { return std::string_view(in_).substr(at_).starts_with(text); }
  void put(std::string_view text) { result_.pcre += text; }
  void begin_atom() {
    if (!in_set_) atom_ = result_.pcre.size();
  }

  void step() {
    const char c = in_[at_];
    const bool after_literal = std::exchange(after_literal_, false);
    if (c == '\\') {
      begin_atom();
      escape();
    } else if (in_set_) {
      in_set(after_literal);
    } else if (c == '[') {
      begin_atom();
      in_set_ = true;
      put("[");
      ++at_;
      if (next_is("^")) copy(1);
      if (next_is("]")) copy(1);  // literal at the beginning
    } else if (c == '(') {
      open_.push_back(result_.pcre.size());
      copy(1);
      if (next_is("?")) group_options();
    } else if (c == ')') {
      if (!open_.empty()) {
        atom_ = open_.back();
        open_.pop_back();
      }
      copy(1);
    } else if (c == '{') {
      quantifier();
    } else if (std::string_view("*+?|^$").find(c) != std::string_view::npos) {
      copy(1);
    } else {
      begin_atom();
      literal();
    }
  }

  void copy(size_t bytes) {
    put(std::string_view(in_).substr(at_, bytes));
    at_ += bytes;
  }

  void literal() {
    const size_t begin = at_;
    add_literal(next_character(in_, at_));
    put(std::string_view(in_).substr(begin, at_ - begin));
  }

  void add_literal(char32_t c) {
    if (in_range_) {
      literals_.back().last = c;
    } else {
      literals_.push_back({c, c});
    }
    after_literal_ = in_set_ && !in_range_;
    in_range_ = false;
  }

  void in_set(bool after_literal) {
    if (after_literal && next_is("-") && at_ + 1 < in_.size() && in_[at_ + 1] != ']') {
      in_range_ = true;
      return copy(1);
    }
    if (next_is("[:")) {
      constexpr std::pair<std::string_view, std::string_view> known[] = {{"[:punct:]", "\\p{P}\\p{S}"},
                                                                         {"[:space:]", "\\s"},
                                                                         {"[:digit:]", "\\d"},
                                                                         {"[:xdigit:]", hex_digit_class}};
      for (const auto& [name, members] : known)
        if (next_is(name)) {
          result_.has_classes = true;
          put(members);
          at_ += name.size();
          return;
        }
      refuse("this POSIX class");
    }
    if (next_is("[")) refuse("a set within a set");
    if (next_is("&&")) refuse("an intersection of sets");
    if (next_is("]")) {
      in_set_ = false;
      return copy(1);
    }
    literal();
  }

  // Ruby's (?m), a dot that matches line ends, is (?s) in PCRE2.
  void group_options() {
    copy(1);
    while (at_ < in_.size() && std::string_view("imx-").find(in_[at_]) != std::string_view::npos) {
      put(in_[at_] == 'm' ? "s" : std::string_view(in_).substr(at_, 1));
      ++at_;
    }
  }

  // In Ruby X{1,3}+ repeats X{1,3}; in PCRE2 it would be possessive.
  void quantifier() {
    const size_t end = in_.find('}', at_);
    const bool counts =
        end != std::string::npos && end > at_ + 1 && in_.find_first_not_of("0123456789,", at_ + 1) == end;
    if (!counts) {
      begin_atom();
      return literal();
    }
    const bool repeated = end + 1 < in_.size() && in_[end + 1] == '+';
    if (repeated) result_.pcre.insert(atom_, "(?:");
    copy(end + 1 - at_);
    if (repeated) put(")");
  }

  void escape() {
    if (at_ + 1 == in_.size()) refuse("a backslash at the end");
    const char c = in_[at_ + 1];
    const auto classes = [&](std::string_view members, bool negated) {
      if (negated && in_set_) refuse(fmt::format("\\{} in a set", c));
      put(in_set_ ? std::string(members) : fmt::format("[{}{}]", negated ? "^" : "", members));
      result_.has_classes = result_.has_classes || members == word_class;
      at_ += 2;
    };
    switch (c) {
      case 'w':
      case 'W':
        return classes(word_class, c == 'W');
      case 'h':
      case 'H':
        return classes(hex_digit_class, c == 'H');
      case 'b':
      case 'B': {
        if (in_set_) return copy(2);
        const std::string word = fmt::format("[{}]", word_class);
        put(c == 'b' ? fmt::format("(?:(?<={0})(?!{0})|(?<!{0})(?={0}))", word)
                     : fmt::format("(?:(?<={0})(?={0})|(?<!{0})(?!{0}))", word));
        result_.has_classes = true;
        at_ += 2;
        return;
      }
      case 's':
      case 'S':
      case 'd':
      case 'D':
        result_.has_classes = true;
        return copy(2);
      case 'v':
        put("\\x0b");
        at_ += 2;
        return;
      case 'p':
      case 'P':
        return property();
      case 'u':
      case 'x':
        return code_point();
      default: {
        put("\\");
        ++at_;
        const bool letter = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
        if (letter && std::string_view("aefnrtAzZGKR0123456789").find(c) == std::string_view::npos)
          refuse(fmt::format("\\{}", c));
        literal();
      }
    }
  }

  void property() {
    const size_t end = in_.find('}', at_);
    if (!next_is("\\p{") && !next_is("\\P{")) refuse("\\p without braces");
    if (end == std::string::npos) refuse("\\p without an end");
    std::string name = in_.substr(at_ + 3, end - at_ - 3);
    const bool caret = name.starts_with('^');
    if (caret) name.erase(0, 1);
    std::string known;
    if (name.size() <= 2) known = name;  // a general category, validated by PCRE2
    for (const char* script : {"Han", "Hiragana", "Katakana", "Bopomofo", "Hangul"})
      if (name == script) known = "sc:" + name;
    if (known.empty()) refuse(fmt::format("\\p{{{}}}", name));
    put(fmt::format("\\{}{{{}{}}}", in_[at_ + 1], caret ? "^" : "", known));
    result_.has_classes = true;
    at_ = end + 1;
  }

  void code_point() {
    const size_t digits = in_[at_ + 1] == 'u' ? 4 : 2;
    const bool braces = digits == 2 && at_ + 2 < in_.size() && in_[at_ + 2] == '{';
    const size_t begin = at_ + (braces ? 3 : 2);
    const size_t end = braces ? in_.find('}', begin) : begin + digits;
    if (end == std::string::npos || end > in_.size() || end == begin || end - begin > 8)
      refuse("this \\x or \\u");
    const std::string hex = in_.substr(begin, end - begin);
    if (hex.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) refuse("this \\x or \\u");
    add_literal(static_cast<char32_t>(std::strtoul(hex.c_str(), nullptr, 16)));
    put(fmt::format("\\x{{{}}}", hex));
    at_ = end + (braces ? 1 : 0);
  }

  // A literal range of the pattern must contain either both a character and its stand-in, or neither.
  void require_equal_treatment() const {
    for (const StandIn& row : stand_in_table)
      for (const auto& [first, last] : literals_) {
        const bool has_stand_in = row.stand_in >= first && row.stand_in <= last;
        const bool has_some = row.last >= first && row.first <= last,
                   has_all = row.first >= first && row.last <= last;
        if (has_stand_in ? !has_all : has_some)
          refuse(fmt::format("U+{:04X} to U+{:04X} beside classes of characters",
                             static_cast<uint32_t>(first), static_cast<uint32_t>(last)));
      }
  }

  struct Range {
    char32_t first, last;
  };
  const std::string& in_;
  const std::string& where_;
  OnigurumaPattern result_;
  std::vector<Range> literals_;  // single characters and ranges of sets
  std::vector<size_t> open_;     // offsets of the open groups in the result
  size_t at_ = 0, atom_ = 0;     // atom_: offset of the last atom in the result
  bool in_set_ = false, in_range_ = false, after_literal_ = false;
};

}  // namespace

bool replace_new_characters(std::string_view text, std::string& out) {
  static const Filter filter;
  size_t copied = 0;
  bool any = false;
  for (size_t at = 0; at < text.size();) {
    if (uint64_t eight; at + sizeof eight <= text.size()) {
      std::memcpy(&eight, text.data() + at, sizeof eight);
      if ((eight & 0x8080808080808080ull) == 0) {
        at += sizeof eight;
        continue;
      }
    }
    const auto byte = static_cast<uint8_t>(text[at]);
    if (byte < 0xE0) {  // the table begins above U+0800
      at += byte < 0x80 ? 1 : 2;
      continue;
    }
    const size_t begin = at;
    const char32_t c = next_character(text, at);
    if (!filter.may_have(c)) continue;
    const StandIn* row = stand_in_of(c);
    if (row == nullptr) continue;
    if (!any) out.clear();
    any = true;
    out += text.substr(copied, begin - copied);
    append_utf8(out, row->stand_in);
    copied = at;
  }
  if (any) out += text.substr(copied);
  return any;
}

OnigurumaPattern from_oniguruma(const std::string& pattern, const std::string& where) {
  return Translator(pattern, where).run();
}

}  // namespace nrl::data
