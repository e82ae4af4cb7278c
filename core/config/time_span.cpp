#include "core/config/time_span.h"

namespace nrl {

std::optional<int64_t> parse_time_span(std::string_view text) {
  constexpr int64_t limits[] = {60, 60, 24};  // of seconds, minutes, hours
  constexpr int64_t units[] = {1, 60, 3600, 86400};
  constexpr size_t most_digits = 4;
  int64_t sum = 0;
  for (int field = 0; field < 4; ++field) {
    const size_t colon = text.rfind(':');
    const std::string_view digits = colon == std::string_view::npos ? text : text.substr(colon + 1);
    if (digits.empty() || digits.size() > most_digits) return std::nullopt;
    int64_t value = 0;
    for (const char c : digits) {
      if (c < '0' || c > '9') return std::nullopt;
      value = value * 10 + (c - '0');
    }
    const bool first = colon == std::string_view::npos;
    if (!first && value >= limits[field < 3 ? field : 0]) return std::nullopt;
    sum += value * units[field];
    if (first) return sum;
    text = text.substr(0, colon);
  }
  return std::nullopt;
}

}  // namespace nrl
