#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include <unistd.h>

#include "core/base/threads.h"
#include "core/device/cpu/binding.h"
#include "core/device/cpu/features.h"

namespace nrl::cpu {

OmpThreads omp_num_threads() {
  const char* const value = std::getenv("OMP_NUM_THREADS");
  if (value == nullptr) return {};
  const std::string_view all(value);
  OmpThreads out;
  for (size_t begin = 0; begin <= all.size();) {
    const size_t comma = std::min(all.find(',', begin), all.size());
    std::string_view text = all.substr(begin, comma - begin);
    text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
    text.remove_suffix(text.size() - std::min(text.find_last_not_of(" \t") + 1, text.size()));
    int threads = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), threads);
    if (error != std::errc() || end != text.data() + text.size() || threads < 1 || threads > max_threads)
      return {.invalid = std::string(all)};
    if (begin == 0) out.threads = threads;
    begin = comma + 1;
  }
  return out;
}

int available_cores() {
  return std::max(static_cast<int>(cores_of(allowed_cpus()).size()), 1);
}

void silence_hwloc_without_sysfs() {
  if (access("/sys/devices/system/cpu", F_OK) != 0) setenv("HWLOC_HIDE_ERRORS", "2", /*overwrite=*/0);
}

}  // namespace nrl::cpu
