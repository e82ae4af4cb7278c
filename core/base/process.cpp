#include "core/base/process.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

namespace nrl {

std::string host_name() {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  return host;
}

std::string boot_id() {
  std::ifstream in("/proc/sys/kernel/random/boot_id");
  std::string line;
  std::getline(in, line);
  return line;
}

std::optional<ProcessFacts> read_process(int64_t pid) {
  std::array<char, 32> path;
  std::array<char, 1024> text;
  std::snprintf(path.data(), path.size(), "/proc/%lld/stat", static_cast<long long>(pid));
  const int fd = ::open(path.data(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  const ssize_t n = ::read(fd, text.data(), text.size() - 1);
  ::close(fd);
  if (n <= 0) return std::nullopt;
  text[static_cast<size_t>(n)] = 0;
  const char* field = std::strrchr(text.data(), ')');  // a name may contain spaces and brackets
  if (field == nullptr || field[1] != ' ') return std::nullopt;
  ProcessFacts facts;
  if (const char* name = std::strchr(text.data(), '('); name != nullptr)
    std::memcpy(facts.name, name + 1,
                std::min<size_t>(sizeof facts.name - 1, static_cast<size_t>(field - name - 1)));
  field += 2;  // the third one
  facts.state = *field;
  for (int number = 3; field != nullptr; ++number) {
    if (number == 22) facts.start_ticks = std::strtoull(field, nullptr, 10);
    if (number == 52 && facts.state == 'Z')
      facts.wait_status = static_cast<int>(std::strtol(field, nullptr, 10));
    field = std::strchr(field, ' ');
    if (field != nullptr) ++field;
  }
  return facts;
}

int64_t start_ticks_of(int64_t pid) {
  const auto facts = read_process(pid);
  return facts ? static_cast<int64_t>(facts->start_ticks) : 0;
}

std::vector<int64_t> process_numbers() {
  std::vector<int64_t> out;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    int64_t pid = 0;
    const auto [end, problem] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (problem == std::errc() && end == name.data() + name.size()) out.push_back(pid);
  }
  return out;
}

}  // namespace nrl
