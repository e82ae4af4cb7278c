#include "apps/data/json_line.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "apps/data/unicode.h"

namespace nrl::data {
namespace {

// True if one of eight bytes is a quote, a backslash or a control character.
bool any_special(uint64_t eight) {
  constexpr uint64_t ones = 0x0101010101010101ull, high = 0x8080808080808080ull;
  const auto has_zero = [&](uint64_t v) { return (v - ones) & ~v & high; };
  return (has_zero(eight ^ ones * '"') | has_zero(eight ^ ones * '\\') |
          ((eight - ones * 0x20) & ~eight & high)) != 0;
}

/// Every function returns false where the line needs parse_json().
class LineReader {
 public:
  explicit LineReader(std::string_view line) : at_(line.data()), end_(line.data() + line.size()) {}

  bool read(std::string_view key, std::string& text) {
    constexpr size_t max_members = 16;
    std::array<std::string, max_members> keys;
    bool found = false;
    if (!take('{')) return false;
    for (size_t count = 0; count < max_members; ++count) {
      std::string& own = keys[count];
      if (!string(&own) || !take(':')) return false;
      if (std::find(keys.begin(), keys.begin() + count, own) != keys.begin() + count) return false;
      space();
      const bool wanted = own == key;
      if (wanted) found = true;
      if (wanted ? !string(&text) : !value()) return false;
      if (take(',')) continue;
      if (!take('}')) return false;
      space();
      return found && at_ == end_;
    }
    return false;
  }

 private:
  void space() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r')) ++at_;
  }
  bool take(char c) {
    space();
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }

  bool value() {
    if (at_ == end_) return false;
    if (*at_ == '"') return string(nullptr);
    for (const std::string_view word : {"true", "false", "null"})
      if (std::string_view(at_, static_cast<size_t>(end_ - at_)).starts_with(word)) {
        at_ += word.size();
        return true;
      }
    return number();
  }

  // Up to 15 digits without an exponent, which cannot be out of range.
  bool number() {
    if (at_ < end_ && *at_ == '-') ++at_;
    const char* const whole = at_;
    const auto digits = [&] {
      const char* const begin = at_;
      while (at_ < end_ && *at_ >= '0' && *at_ <= '9') ++at_;
      return at_ - begin;
    };
    const auto before = digits();
    if (before == 0 || before > 15 || (before > 1 && *whole == '0')) return false;
    if (at_ < end_ && *at_ == '.') {
      ++at_;
      const auto after = digits();
      if (after == 0 || after > 15) return false;
    }
    return true;
  }

  // Reads a string into `out`, if it is not null.
  bool string(std::string* out) {
    if (!take('"')) return false;
    if (out) out->clear();
    while (true) {
      const char* const begin = at_;
      for (uint64_t eight; end_ - at_ >= 8; at_ += 8) {
        std::memcpy(&eight, at_, 8);
        if (any_special(eight)) break;
      }
      while (at_ < end_ && *at_ != '"' && *at_ != '\\' && static_cast<uint8_t>(*at_) >= 0x20) ++at_;
      if (out) out->append(begin, at_);
      if (at_ == end_ || static_cast<uint8_t>(*at_) < 0x20) return false;
      if (*at_++ == '"') return true;
      if (!escape(out)) return false;
    }
  }

  bool escape(std::string* out) {
    if (at_ == end_) return false;
    constexpr std::string_view names = "\"\\/bfnrt", characters = "\"\\/\b\f\n\r\t";
    const char name = *at_++;
    if (const size_t i = names.find(name); i != std::string_view::npos) {
      if (out) *out += characters[i];
      return true;
    }
    uint32_t c = 0, low = 0;
    if (name != 'u' || !hex(c)) return false;
    if (c >= 0xD800 && c <= 0xDFFF) {
      if (c > 0xDBFF || end_ - at_ < 2 || at_[0] != '\\' || at_[1] != 'u') return false;
      at_ += 2;
      if (!hex(low) || low < 0xDC00 || low > 0xDFFF) return false;
      c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
    }
    if (out) append_utf8(*out, c);
    return true;
  }

  bool hex(uint32_t& value) {
    if (end_ - at_ < 4) return false;
    for (int i = 0; i < 4; ++i) {
      const char c = *at_++;
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) return false;
      value = value << 4 | static_cast<uint32_t>(digit);
    }
    return true;
  }

  const char* at_;
  const char* const end_;
};

}  // namespace

std::optional<std::string> text_of_plain_line(std::string_view line, std::string_view key) {
  std::string text;
  if (!LineReader(line).read(key, text)) return std::nullopt;
  return text;
}

}  // namespace nrl::data
