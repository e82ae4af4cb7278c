#include "apps/data/unicode.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/base/error.h"

namespace nrl::data {
namespace {

struct Decomposition {
  uint32_t character, first, second;
};
struct ClassRange {
  uint32_t first, last;
  uint8_t value;
};
#include "apps/data/nfc_tables.inc"

// Hangul syllables (The Unicode Standard, section 3.12).
constexpr uint32_t s_base = 0xAC00, l_base = 0x1100, v_base = 0x1161, t_base = 0x11A7;
constexpr uint32_t l_count = 19, v_count = 21, t_count = 28, s_count = l_count * v_count * t_count;

class Normalizer {
 public:
  Normalizer() : suspicious_(0x110000 / 8, 0) {
    for (const Decomposition& d : composite_table) {
      decompose_[d.character] = {d.first, d.second};
      compose_[uint64_t{d.first} << 32 | d.second] = d.character;
      suspect(d.second);
    }
    for (const Decomposition& d : excluded_composites) {
      decompose_[d.character] = {d.first, d.second};
      suspect(d.character);
    }
    for (const ClassRange& r : combining_classes)
      for (uint32_t c = r.first; c <= r.last; ++c) suspect(c);
    for (uint32_t v = 0; v < v_count; ++v) suspect(v_base + v);
    for (uint32_t t = 1; t < t_count; ++t) suspect(t_base + t);
  }

  /// False if no character can change or compose, so that the text is already in form C (NFC_Quick_Check).
  bool may_change(std::string_view text) const {
    for (size_t at = 0; at < text.size();) {
      if (static_cast<uint8_t>(text[at]) < 0xCC) {  // suspicious characters begin at U+0300
        at += static_cast<uint8_t>(text[at]) < 0x80 ? 1 : 2;
        continue;
      }
      const uint32_t c = next_character(text, at);
      if (suspicious_[c / 8] >> (c % 8) & 1) return true;
    }
    return false;
  }

  std::string normalize(std::string_view text) const {
    std::u32string characters;
    for (size_t at = 0; at < text.size();) append_decomposed(characters, next_character(text, at));
    reorder(characters);
    compose(characters);
    std::string out;
    out.reserve(text.size());
    for (const char32_t c : characters) append_utf8(out, c);
    return out;
  }

 private:
  void suspect(uint32_t c) { suspicious_[c / 8] = static_cast<uint8_t>(suspicious_[c / 8] | 1u << (c % 8)); }

  static uint8_t class_of(uint32_t c) {
    const auto* r =
        std::lower_bound(std::begin(combining_classes), std::end(combining_classes), c,
                         [](const ClassRange& range, uint32_t value) { return range.last < value; });
    return r != std::end(combining_classes) && r->first <= c ? r->value : 0;
  }

  void append_decomposed(std::u32string& out, uint32_t c) const {
    if (c - s_base < s_count) {
      const uint32_t s = c - s_base;
      out += l_base + s / (v_count * t_count);
      out += v_base + s % (v_count * t_count) / t_count;
      if (s % t_count != 0) out += t_base + s % t_count;
      return;
    }
    const auto found = c < 0xC0 ? decompose_.end() : decompose_.find(c);
    if (found == decompose_.end()) {
      out += c;
      return;
    }
    append_decomposed(out, found->second.first);
    if (found->second.second != 0) out += found->second.second;  // a second part never decomposes further
  }

  static void reorder(std::u32string& text) {
    for (size_t begin = 0; begin < text.size();) {
      if (class_of(text[begin]) == 0) {
        ++begin;
        continue;
      }
      size_t end = begin;
      while (end < text.size() && class_of(text[end]) != 0) ++end;
      std::stable_sort(text.begin() + static_cast<ptrdiff_t>(begin),
                       text.begin() + static_cast<ptrdiff_t>(end),
                       [](char32_t a, char32_t b) { return class_of(a) < class_of(b); });
      begin = end;
    }
  }

  uint32_t composed(uint32_t a, uint32_t b) const {
    if (a - l_base < l_count && b - v_base < v_count)
      return s_base + ((a - l_base) * v_count + (b - v_base)) * t_count;
    if (a - s_base < s_count && (a - s_base) % t_count == 0 && b - t_base - 1 < t_count - 1)
      return a + (b - t_base);
    const auto found = compose_.find(uint64_t{a} << 32 | b);
    return found == compose_.end() ? 0 : found->second;
  }

  void compose(std::u32string& text) const {
    constexpr size_t none = SIZE_MAX;
    size_t out = 0, starter = none;
    uint8_t last_class = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      const uint32_t c = text[i];
      const uint8_t k = class_of(c);
      // Blocked if a character of the same or a higher class (or another starter) is in between.
      const bool adjacent = starter != none && out == starter + 1;
      if (starter != none && (adjacent || (last_class != 0 && last_class < k))) {
        if (const uint32_t whole = composed(text[starter], c); whole != 0) {
          text[starter] = whole;
          continue;
        }
      }
      if (k == 0) starter = out;
      last_class = k;
      text[out++] = c;
    }
    text.resize(out);
  }

  std::unordered_map<uint32_t, std::pair<uint32_t, uint32_t>> decompose_;
  std::unordered_map<uint64_t, uint32_t> compose_;
  std::vector<uint8_t> suspicious_;  // one bit per character
};

const Normalizer& normalizer() {
  static const Normalizer instance;
  return instance;
}

}  // namespace

size_t find_invalid_utf8(std::string_view text) {
  const size_t size = text.size();
  size_t i = 0;
  const auto byte = [&](size_t at) -> uint32_t { return at < size ? static_cast<uint8_t>(text[at]) : 0; };
  const auto follows = [&](size_t at) { return (byte(at) & 0xC0) == 0x80; };
  while (i < size) {
    if (i + 8 <= size) {
      uint64_t eight;
      std::memcpy(&eight, text.data() + i, 8);
      if ((eight & 0x8080808080808080ull) == 0) {
        i += 8;
        continue;
      }
    }
    const uint32_t b = byte(i), second = byte(i + 1);
    if (b < 0x80) {
      i += 1;
    } else if (b >= 0xC2 && b <= 0xDF && follows(i + 1)) {
      i += 2;
    } else if (b >= 0xE0 && b <= 0xEF && follows(i + 1) && follows(i + 2) && !(b == 0xE0 && second < 0xA0) &&
               !(b == 0xED && second >= 0xA0)) {
      i += 3;
    } else if (b >= 0xF0 && b <= 0xF4 && follows(i + 1) && follows(i + 2) && follows(i + 3) &&
               !(b == 0xF0 && second < 0x90) && !(b == 0xF4 && second >= 0x90)) {
      i += 4;
    } else {
      return i;
    }
  }
  return std::string_view::npos;
}

void require_utf8(std::string_view text) {
  if (const size_t bad = find_invalid_utf8(text); bad != std::string_view::npos)
    fail(Exit::data, "the text is not valid UTF-8 at byte {}", bad);
}

char32_t next_character(std::string_view text, size_t& at) {
  const auto byte = [&](size_t k) { return static_cast<uint32_t>(static_cast<uint8_t>(text[at + k])); };
  const uint32_t b = byte(0);
  uint32_t c = b;
  size_t length = 1;
  if (b >= 0xF0) {
    c = (b & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63);
    length = 4;
  } else if (b >= 0xE0) {
    c = (b & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63);
    length = 3;
  } else if (b >= 0xC0) {
    c = (b & 31) << 6 | (byte(1) & 63);
    length = 2;
  }
  at += length;
  return c;
}

void append_utf8(std::string& out, char32_t c) {
  const auto put = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6), put(0x80 | (c & 63));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 63)), put(0x80 | (c & 63));
  } else {
    put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 63)), put(0x80 | (c >> 6 & 63)), put(0x80 | (c & 63));
  }
}

std::string to_nfc(std::string_view text) {
  return normalizer().may_change(text) ? normalizer().normalize(text) : std::string(text);
}

}  // namespace nrl::data
