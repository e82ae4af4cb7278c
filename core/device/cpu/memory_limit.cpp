#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>

#include <unistd.h>

#include "core/device/cpu/memory.h"

namespace nrl::cpu {

size_t control_group_limit(std::string_view membership, const std::string& root) {
  size_t limit = SIZE_MAX;
  const auto read = [&](const std::string& path) {
    // "max" (no limit) does not parse as a number and leaves the limit as it is.
    size_t bytes = 0;
    if (std::ifstream in(path); in >> bytes) limit = std::min(limit, bytes);
  };
  std::istringstream lines{std::string(membership)};
  for (std::string line; std::getline(lines, line);) {
    // "0::/path" (version 2), "4:memory:/path" (version 1).
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool version2 = controllers.empty();
    if (!version2 && ("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    const std::string base = version2 ? root : root + "/memory",
                      file = version2 ? "/memory.max" : "/memory.limit_in_bytes";
    // A limit of any group above binds too. Inside a container the path may be that of the host: then only
    // the root is there.
    for (std::string group = line.substr(second + 1);; group.resize(group.rfind('/'))) {
      while (group.ends_with('/')) group.pop_back();
      read(base + group + file);
      if (group.find('/') == std::string::npos) break;
    }
  }
  return limit;
}

size_t machine_memory() {
  const size_t installed =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::stringstream membership;
  membership << std::ifstream("/proc/self/cgroup").rdbuf();
  return std::min(installed, control_group_limit(membership.str(), "/sys/fs/cgroup"));
}

}  // namespace nrl::cpu
