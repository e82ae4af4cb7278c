#include "core/base/cpu_list.h"

#include <algorithm>
#include <charconv>

#include <spdlog/fmt/fmt.h>

namespace nrl {
namespace {

constexpr int most = 1 << 20;  // more than any machine has

// The number at the beginning of `text`, which it takes off.
std::optional<int> take_number(std::string_view& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || text.front() == '-' || value >= most) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

}  // namespace

std::optional<std::vector<int>> parse_cpu_list(std::string_view text) {
  std::vector<int> out;
  while (true) {
    const std::optional<int> first = take_number(text);
    if (!first) return std::nullopt;
    std::optional<int> last = first;
    if (text.starts_with('-')) {
      text.remove_prefix(1);
      last = take_number(text);
      if (!last || *last < *first) return std::nullopt;
    }
    if (out.size() + static_cast<size_t>(*last - *first) >= most) return std::nullopt;
    for (int cpu = *first; cpu <= *last; ++cpu) out.push_back(cpu);
    if (text.empty()) break;
    if (!text.starts_with(',')) return std::nullopt;
    text.remove_prefix(1);
  }
  std::vector<int> sorted = out;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) return std::nullopt;
  return out;
}

std::string cpu_list_text(std::span<const int> cpus) {
  std::string out;
  for (size_t i = 0; i < cpus.size();) {
    size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    out += fmt::format("{}{}", out.empty() ? "" : ",", cpus[i]);
    if (end > i + 1) out += fmt::format("-{}", cpus[end - 1]);
    i = end;
  }
  return out;
}

}  // namespace nrl
