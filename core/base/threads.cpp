#include "core/base/threads.h"

#include <fstream>
#include <new>
#include <system_error>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#include <pthread.h>

#include "core/base/text.h"

namespace nrl {

namespace {

std::optional<int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // no such file, or "max"
}

/// Directories of this process's control group that may limit processes, the innermost first.
std::vector<std::string> cgroup_directories(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::vector<std::string> out;
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers != "pids") continue;  // version 2, or version 1's pids
    const std::string mount = root + "/sys/fs/cgroup" + (controllers.empty() ? "" : "/pids");
    for (std::string path = line.substr(second + 1); path.size() > 1; path.erase(path.rfind('/')))
      out.push_back(mount + path);
    out.push_back(mount);
  }
  return out;
}

/// Bytes that the process has mapped; 0: unknown.
int64_t mapped_bytes(const std::string& root) {
  return number_in(root + "/proc/self/statm").value_or(0) * sysconf(_SC_PAGESIZE);
}

int64_t thread_stack_bytes() {
  pthread_attr_t attributes;
  size_t bytes = 0;
  if (pthread_attr_init(&attributes) != 0) return 0;
  pthread_attr_getstacksize(&attributes, &bytes);
  pthread_attr_destroy(&attributes);
  return static_cast<int64_t>(bytes);
}

}  // namespace

ThreadLimits read_thread_limits(const std::string& root) {
  ThreadLimits limits;
  rlimit user{};
  if (getrlimit(RLIMIT_NPROC, &user) == 0 && user.rlim_cur != RLIM_INFINITY)
    limits.user = static_cast<int64_t>(user.rlim_cur);
  for (const std::string& directory : cgroup_directories(root)) {
    const auto most = number_in(directory + "/pids.max"), current = number_in(directory + "/pids.current");
    if (!most) continue;
    if (limits.cgroup && *most - current.value_or(0) >= *limits.cgroup - limits.cgroup_current.value_or(0))
      continue;
    limits.cgroup = most;
    limits.cgroup_current = current;
    limits.cgroup_path = directory;
  }
  limits.system = number_in(root + "/proc/sys/kernel/threads-max");
  rlimit space{};
  if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY)
    limits.address_space = static_cast<int64_t>(space.rlim_cur);
  limits.address_space_used = mapped_bytes(root);
  limits.stack = thread_stack_bytes();
  return limits;
}

std::string describe_thread_limit(const ThreadLimits& limits) {
  // The control group reports its current count; the user's is expensive to get, so it is the fallback.
  constexpr int64_t near = 2;
  const bool cgroup_full = limits.cgroup && limits.cgroup_current.value_or(0) + near >= *limits.cgroup;
  // A thread that is refused maps nothing but its stack; a little may have been freed since.
  constexpr int64_t freed = int64_t{16} << 20;
  const bool space_full =
      limits.address_space && *limits.address_space - limits.address_space_used < limits.stack + freed;
  std::string limit, raise;
  if (space_full) {
    limit =
        fmt::format("the process may map {} (ulimit -v, RLIMIT_AS), has {}, and a thread needs {} of stack",
                    human_bytes(static_cast<uint64_t>(*limits.address_space)),
                    human_bytes(static_cast<uint64_t>(limits.address_space_used)),
                    human_bytes(static_cast<uint64_t>(limits.stack)));
    raise = "raise it with ulimit -v";
  } else if (limits.cgroup && (cgroup_full || !limits.user)) {
    limit = fmt::format("the control group {} allows {} processes and threads (pids.max){}",
                        limits.cgroup_path, *limits.cgroup,
                        limits.cgroup_current ? fmt::format(" and has {}", *limits.cgroup_current) : "");
    raise = "raise pids.max (docker --pids-limit, systemd TasksMax)";
  } else if (limits.user) {
    limit =
        fmt::format("the user limit on processes and threads is {} (ulimit -u, RLIMIT_NPROC)", *limits.user);
    raise = "raise it with ulimit -u";
  } else {
    limit = fmt::format(
        "no limit is set for the user or the control group, the system's is {} (kernel.threads-max)",
        limits.system ? fmt::format("{}", *limits.system) : "unknown");
    raise = "end other programs";
  }
  return fmt::format(
      "thread not started: {}. Fix: {}, or use fewer threads (kernels.num_threads, data.num_workers, "
      "--threads, --workers) or fewer ranks per node",
      limit, raise);
}

void fail_thread_refused() {
  throw Error(Exit::out_of_memory, describe_thread_limit(read_thread_limits()));
}

Error error_from(const std::exception& e) {
  if (const auto* error = dynamic_cast<const Error*>(&e)) return *error;
  if (dynamic_cast<const std::bad_alloc*>(&e)) return {Exit::out_of_memory, "out of memory"};
  const auto* system = dynamic_cast<const std::system_error*>(&e);
  if (system && system->code() == std::errc::resource_unavailable_try_again)
    return {Exit::out_of_memory, describe_thread_limit(read_thread_limits())};
  return {Exit::internal, fmt::format("{} (this is a bug in nrl-train)", e.what())};
}

}  // namespace nrl
