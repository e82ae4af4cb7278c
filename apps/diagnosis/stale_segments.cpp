#include "apps/diagnosis/stale_segments.h"

#include <ctime>
#include <fstream>
#include <set>

#include <sys/stat.h>
#include <unistd.h>

#include <spdlog/fmt/fmt.h>

#include "core/base/error.h"
#include "core/base/process.h"
#include "core/io/atomic_file.h"

namespace nrl::diagnosis {
namespace {

/// Names below `directory` that processes have mapped.
std::set<std::string> mapped_names(const std::string& directory) {
  std::set<std::string> out;
  const std::string before = directory + "/";
  for (const int64_t pid : process_numbers()) {
    std::ifstream maps(fmt::format("/proc/{}/maps", pid));
    for (std::string line; std::getline(maps, line);)
      if (const size_t at = line.find(before); at != std::string::npos)
        out.insert(line.substr(at + before.size()));
  }
  return out;
}

}  // namespace

int remove_stale_segments(const std::string& directory, double age) {
  int removed = 0;
  try {
    const std::string host = host_name();
    const std::string own = fmt::format("vader_segment.{}.{}.", host.substr(0, host.find('.')), ::geteuid());
    std::set<std::string> stale;
    for (const std::string& name : list_directory(directory)) {
      struct stat st = {};
      if (name.starts_with(own) && ::lstat(join_path(directory, name).c_str(), &st) == 0 &&
          S_ISREG(st.st_mode) && st.st_uid == ::geteuid() &&
          std::difftime(std::time(nullptr), st.st_mtime) >= age)
        stale.insert(name);
    }
    if (stale.empty()) return 0;
    for (const std::string& name : mapped_names(directory)) stale.erase(name);
    for (const std::string& name : stale)
      removed += ::unlink(join_path(directory, name).c_str()) == 0 ? 1 : 0;
  } catch (const Error&) {
  }
  return removed;
}

}  // namespace nrl::diagnosis
