#include "core/base/memory_kills.h"

#include <array>
#include <cstdlib>
#include <fstream>
#include <string_view>

#include <fcntl.h>
#include <unistd.h>

namespace nrl {

MemoryKills::MemoryKills(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  // Lines "ID:CONTROLLERS:PATH"; version 2 has no controllers. A container may see its group as the root.
  for (std::string line; fd_ < 0 && std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1),
                      path = line.substr(second + 1);
    const std::string base = root + "/sys/fs/cgroup";
    if (controllers.empty())
      static_cast<void>(open(base + path + "/memory.events") || open(base + "/memory.events"));
    else if (("," + controllers + ",").find(",memory,") != std::string::npos)
      static_cast<void>(open(base + "/memory" + path + "/memory.oom_control") ||
                        open(base + "/memory/memory.oom_control"));
  }
  if (fd_ < 0) open(root + "/proc/vmstat");
}

MemoryKills::~MemoryKills() {
  if (fd_ >= 0) ::close(fd_);
}

bool MemoryKills::open(const std::string& path) {
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ >= 0 && count() >= 0) return true;
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
  return false;
}

int64_t MemoryKills::count() const {
  std::array<char, 16384> buffer;  // of /proc/vmstat it is one of the last lines
  size_t size = 0;
  while (size < buffer.size() - 1) {
    const ssize_t n = ::pread(fd_, buffer.data() + size, buffer.size() - 1 - size, static_cast<off_t>(size));
    if (n <= 0) break;
    size += static_cast<size_t>(n);
  }
  buffer[size] = 0;
  const std::string_view text(buffer.data(), size), name = "oom_kill ";
  for (size_t at = text.find(name); at != std::string_view::npos; at = text.find(name, at + 1))
    if (at == 0 || text[at - 1] == '\n') return std::atoll(buffer.data() + at + name.size());
  return -1;
}

}  // namespace nrl
