#include "core/base/text.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <numeric>
#include <vector>

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
    // Words whose lengths differ by more than the limit cannot be near: hostile input must not cost time
    // here.
    if (word.size() > candidate.size() + 2 || candidate.size() > word.size() + 2) continue;
    const int distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string human_bytes(uint64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  static constexpr const char* units[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  while (value >= 1024 && unit < 4) value /= 1024, ++unit;
  return fmt::format("{:.{}f} {}", value, value < 10 ? 2 : value < 100 ? 1 : 0, units[unit]);
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
