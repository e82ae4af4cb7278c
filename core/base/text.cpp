#include "core/base/text.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <numeric>
#include <vector>

#include <spdlog/fmt/fmt.h>

namespace nrl {

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

std::string_view nearest(std::string_view word, std::span<const std::string_view> candidates) {
  auto bare = [](std::string_view s) {
    std::string out;
    for (char c : s)
      if (c != '_' && c != '-' && c != '.')
        out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return out;
  };
  const std::string bare_word = bare(word);
  const int limit = word.size() < 4 ? 1 : 2;
  std::string_view best;
  int best_distance = limit + 1;
  for (std::string_view candidate : candidates) {
    if (bare(candidate) == bare_word) return candidate;
    // Skip words whose lengths differ by more than the limit: bounds the time for hostile input.
    if (word.size() > candidate.size() + 2 || candidate.size() > word.size() + 2) continue;
    const int distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view near, std::string_view before) {
  return near.empty() ? "" : fmt::format("{}did you mean '{}'?", before, near);
}

size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned first = byte(0);
  if (first < 0x80) return text.empty() ? 0 : 1;
  size_t length = 0;
  unsigned low = 0x80, high = 0xbf;  // range of the second byte: no overlong forms, no surrogates
  if (first >= 0xc2 && first <= 0xdf) {
    length = 2;
  } else if (first >= 0xe0 && first <= 0xef) {
    length = 3;
    if (first == 0xe0) low = 0xa0;
    if (first == 0xed) high = 0x9f;
  } else if (first >= 0xf0 && first <= 0xf4) {
    length = 4;
    if (first == 0xf0) low = 0x90;
    if (first == 0xf4) high = 0x8f;
  }
  if (length == 0 || byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  return length;
}

size_t complete_utf8(std::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(4, text.size()); ++back) {
    const auto c = static_cast<unsigned char>(text[text.size() - back]);
    if ((c & 0xC0) == 0x80) continue;
    const size_t need = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : c >= 0xC0 ? 2 : 1;
    return need > back ? text.size() - back : text.size();
  }
  return text.size();
}

namespace {

constexpr size_t max_message_line = 1000;

// The code point of a sequence of utf8_length() bytes.
uint32_t code_point(std::string_view sequence) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(sequence[i]); };
  if (sequence.size() == 1) return byte(0);
  uint32_t point = byte(0) & (0xffu >> (sequence.size() + 1));
  for (size_t i = 1; i < sequence.size(); ++i) point = point << 6 | (byte(i) & 0x3f);
  return point;
}

// Characters that control a terminal or reorder its text.
bool is_control(uint32_t c) {
  return c < 0x20 || (c >= 0x7f && c < 0xa0) || c == 0x061c || c == 0x200e || c == 0x200f ||
         (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069) || c == 0xfeff ||
         (c >= 0xfff9 && c <= 0xfffb) || (c >= 0xe0000 && c <= 0xe007f);
}

// `text` with control characters and invalid bytes replaced by what replace(out, bytes, valid) appends.
template <class Replace>
std::string replaced(std::string_view text, bool keep_lines, Replace replace) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    const bool valid = length > 0;
    const std::string_view bytes = text.substr(0, valid ? length : 1);
    const bool kept = keep_lines && (bytes[0] == '\n' || bytes[0] == '\t');
    if (valid && (kept || !is_control(code_point(bytes))))
      out += bytes;
    else
      replace(out, bytes, valid);
    text.remove_prefix(bytes.size());
  }
  return out;
}

void escape(std::string& out, std::string_view bytes, bool valid) {
  const uint32_t c = valid ? code_point(bytes) : static_cast<unsigned char>(bytes[0]);
  if (c == '\n')
    out += "\\n";
  else if (c == '\t')
    out += "\\t";
  else if (c == '\r')
    out += "\\r";
  else
    out += c < 0x100 ? fmt::format("\\x{:02x}", c) : fmt::format("\\u{:04x}", c);
}

// The largest length of at most `at` bytes that does not split a UTF-8 character.
size_t cut_before(std::string_view text, size_t at) {
  while (at > 0 && at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) --at;
  return at;
}

}  // namespace

std::string printable(std::string_view text) {
  return replaced(text, true, escape);
}

std::string masked(std::string_view text) {
  return replaced(text, true, [](std::string& out, std::string_view, bool) { out += '?'; });
}

std::string clipped(std::string_view value, size_t most) {
  // Do not scan the part that is cut off.
  std::string out = replaced(value.substr(0, cut_before(value, most + 4)), false, escape);
  if (out.size() <= most && value.size() <= most) return out;
  out.resize(cut_before(out, std::min(most, out.size())));
  return out + "...";
}

std::string message_text(std::string_view text, std::string_view indent) {
  std::string out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    if (begin > 0) (out += '\n') += line.empty() ? "" : indent;
    if (line.size() > max_message_line) {
      const size_t head = cut_before(line, max_message_line * 2 / 3);
      const size_t tail = cut_before(line, line.size() - max_message_line / 3);
      out += printable(line.substr(0, head));
      out += fmt::format(" ... ({} bytes left out) ... ", tail - head);
      line.remove_prefix(tail);
    }
    out += printable(line);
    begin = end + 1;
  }
  return out;
}

std::string bounded_lines(std::string text, size_t most) {
  if (text.size() <= most) return text;
  constexpr size_t note = 40;  // the line between
  const size_t room = most > note ? most - note : 0;
  // Whole lines; a part of the first one if it alone is too long.
  size_t head = room * 2 / 3;
  if (const size_t line = text.rfind('\n', head); line != std::string::npos && head > 0)
    head = line + 1;
  else
    head = cut_before(text, head);
  size_t tail = text.size() - room / 3;
  if (const size_t line = text.find('\n', tail); line != std::string::npos && line + 1 < text.size())
    tail = line + 1;
  else
    tail = cut_before(text, tail);
  const auto lines = std::count(text.begin() + static_cast<std::ptrdiff_t>(head),
                                text.begin() + static_cast<std::ptrdiff_t>(tail), '\n');
  return fmt::format("{}{}... ({} left out)\n{}", text.substr(0, head),
                     head > 0 && text[head - 1] != '\n' ? "\n" : "",
                     counted(std::max<int64_t>(lines, 1), "line"), text.substr(tail));
}

std::string joined(std::span<const std::string> items, std::string_view separator, size_t most) {
  const size_t shown = std::min(items.size(), most);
  std::string text = fmt::format(
      "{}", fmt::join(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(shown), separator));
  if (items.size() > shown)
    text += fmt::format("{}and {} more", separator.starts_with('\n') ? separator : " ",
                        grouped(static_cast<int64_t>(items.size() - shown)));
  return text;
}

std::string alternatives(std::span<const std::string_view> items) {
  std::string out;
  for (size_t i = 0; i < items.size(); ++i)
    out += fmt::format("{}{}", i == 0 ? "" : i + 1 < items.size() ? ", " : " or ", items[i]);
  return out;
}

std::string human_bytes(uint64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  static constexpr const char* units[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  while (value >= 1024 && unit < 4) value /= 1024, ++unit;
  return fmt::format("{:.{}f} {}", value, value < 10 ? 2 : value < 100 ? 1 : 0, units[unit]);
}

std::string decimal(double value, int digits) {
  return std::isnan(value) ? "nan" : fmt::format("{:.{}f}", value, digits);
}

std::string human_count(double count) {
  if (count < 1000) return fmt::format("{:.0f}", count);
  static constexpr const char* units[] = {"k", "M", "B", "T", "Q"};
  int unit = -1;
  while (count >= 999.5 && unit < 4) count /= 1000, ++unit;
  return fmt::format("{:.{}f} {}", count, count < 10 ? 2 : count < 100 ? 1 : 0, units[unit]);
}

std::string human_duration(double seconds) {
  const auto s = static_cast<int64_t>(seconds + 0.5);
  if (s >= 86400) return fmt::format("{}d{:02}h", s / 86400, s % 86400 / 3600);
  if (s >= 3600) return fmt::format("{}h{:02}m", s / 3600, s % 3600 / 60);
  if (s >= 60) return fmt::format("{}m{:02}s", s / 60, s % 60);
  return fmt::format("{}s", s);
}

std::string grouped(int64_t number) {
  std::string digits = std::to_string(number < 0 ? -number : number);
  for (int i = static_cast<int>(digits.size()) - 3; i > 0; i -= 3) digits.insert(static_cast<size_t>(i), ",");
  return number < 0 ? "-" + digits : digits;
}

std::optional<StepRange> parse_step_range(std::string_view text) {
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  StepRange range;
  auto number = [](std::string_view digits, int64_t& out) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), out);
    return error == std::errc() && end == digits.data() + digits.size();
  };
  if (!number(text.substr(0, colon), range.first) || !number(text.substr(colon + 1), range.end) ||
      range.first < 1 || range.end <= range.first)
    return std::nullopt;
  return range;
}

std::string counted(int64_t number, std::string_view noun) {
  return fmt::format("{} {}{}", grouped(number), noun, number == 1 ? "" : "s");
}

}  // namespace nrl
