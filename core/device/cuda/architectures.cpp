#include "core/device/cuda/architectures.h"

#include <charconv>
#include <vector>

namespace nrl::cuda {
namespace {

struct Architecture {
  int major = 0, minor = 0;
  std::string suffix;  // "", "a" or "f"
  bool machine_code = true, ptx = true;
};

std::vector<Architecture> parse(std::string_view text) {
  std::vector<Architecture> all;
  while (!text.empty()) {
    const size_t end = text.find_first_of(",; ");
    std::string_view word = text.substr(0, end);
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
    Architecture a;
    int number = 0;
    const auto [rest, error] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (error != std::errc() || number < 10) continue;
    word.remove_prefix(static_cast<size_t>(rest - word.data()));
    a.major = number / 10;
    a.minor = number % 10;
    if (word.starts_with('a') || word.starts_with('f')) {
      a.suffix = word.front();
      word.remove_prefix(1);
    }
    a.ptx = word != "-real";
    a.machine_code = word != "-virtual";
    all.push_back(a);
  }
  return all;
}

}  // namespace

bool runs_on(std::string_view architectures, int major, int minor) {
  for (const Architecture& a : parse(architectures)) {
    const bool same = a.major == major && a.minor == minor;
    const bool family = a.major == major && a.minor <= minor;
    const bool newer = a.major < major || family;
    if (a.suffix == "a" ? same : a.suffix == "f" ? family : (a.machine_code && family) || (a.ptx && newer))
      return true;
  }
  return false;
}

std::string architectures_text(std::string_view architectures) {
  std::string text;
  for (const Architecture& a : parse(architectures))
    text += (text.empty() ? "" : ", ") + std::to_string(a.major) + "." + std::to_string(a.minor) + a.suffix;
  return text;
}

}  // namespace nrl::cuda
