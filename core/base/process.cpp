#include "core/base/process.h"

#include <cstdlib>
#include <fstream>

#include <unistd.h>

#include <spdlog/fmt/fmt.h>

namespace nrl {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// Field `number` of /proc/PID/stat, from 3; empty when there is no such process.
std::string stat_field(int64_t pid, int number) {
  const std::string stat = first_line(fmt::format("/proc/{}/stat", pid));
  const size_t name_end = stat.rfind(')');  // the name may hold spaces and parentheses
  if (name_end == std::string::npos) return {};
  size_t at = name_end + 1;
  for (int field = 3; field < number && at != std::string::npos; ++field) at = stat.find(' ', at + 1);
  return at == std::string::npos ? "" : stat.substr(at + 1, stat.find(' ', at + 1) - at - 1);
}

}  // namespace

std::string host_name() {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  return host;
}

std::string boot_id() {
  return first_line("/proc/sys/kernel/random/boot_id");
}

int64_t start_ticks_of(int64_t pid) {
  return std::atoll(stat_field(pid, 22).c_str());
}

char state_of(int64_t pid) {
  const std::string state = stat_field(pid, 3);
  return state.empty() ? 0 : state.front();
}

}  // namespace nrl
