#include "core/base/spawn.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <spawn.h>
#include <spdlog/fmt/fmt.h>

#include "core/base/clock.h"

extern char** environ;

namespace nrl {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

// Waits for a child until `deadline`; true if it has ended.
bool ended(pid_t child, double deadline, int& status) {
  for (;;) {
    const pid_t found = ::waitpid(child, &status, WNOHANG);
    if (found == child || (found < 0 && errno != EINTR)) return true;
    if (steady_seconds() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// Writes until the reader has closed its end, or `deadline`.
void write_input(int fd, std::string_view text, double deadline) {
  while (!text.empty()) {
    pollfd ready{.fd = fd, .events = POLLOUT, .revents = 0};
    const double left = deadline - steady_seconds();
    if (left <= 0 || ::poll(&ready, 1, static_cast<int>(left * 1e3) + 1) <= 0) return;
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno != EINTR && errno != EAGAIN) return;
    if (n > 0) text.remove_prefix(static_cast<size_t>(n));
  }
}

}  // namespace

std::vector<std::string> own_environment() {
  std::vector<std::string> out;
  for (char** entry = environ; *entry; ++entry) out.emplace_back(*entry);
  return out;
}

std::vector<std::string> inherited(std::initializer_list<const char*> names) {
  std::vector<std::string> out;
  for (const char* name : names)
    if (const char* value = std::getenv(name)) out.push_back(std::string(name) + "=" + value);
  return out;
}

int spawn_group(pid_t& child, const std::vector<std::string>& words,
                const std::vector<std::string>& environment, const StandardStreams& streams) {
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  for (const auto& [from, to] : {std::pair(streams.in, STDIN_FILENO), std::pair(streams.out, STDOUT_FILENO),
                                 std::pair(streams.error, STDERR_FILENO)}) {
    if (from >= 0)
      posix_spawn_file_actions_adddup2(&files, from, to);
    else
      posix_spawn_file_actions_addopen(&files, to, "/dev/null", to == STDIN_FILENO ? O_RDONLY : O_WRONLY, 0);
  }
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  // Signals may be blocked in this thread.
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  const int error = posix_spawnp(&child, words.front().c_str(), &files, &attributes, pointers(words).data(),
                                 pointers(environment).data());
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  return error;
}

std::string run_program(const std::vector<std::string>& words, const std::string& input,
                        const std::vector<std::string>& environment, double limit_s, int output) {
  const double deadline = steady_seconds() + limit_s;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return fmt::format("no pipe: {}", std::strerror(errno));
  ::fcntl(ends[1], F_SETFL, O_NONBLOCK);
  pid_t child = 0;
  const int refused = spawn_group(child, words, environment, {.in = ends[0], .out = output, .error = output});
  ::close(ends[0]);
  if (refused == 0) write_input(ends[1], input, deadline);  // SIGPIPE is blocked in this thread
  ::close(ends[1]);
  if (refused != 0) return fmt::format("cannot start {}: {}", words.front(), std::strerror(refused));
  int status = 0;
  if (!ended(child, deadline, status)) {
    ::kill(-child, SIGKILL);
    ended(child, steady_seconds() + 1, status);
    return fmt::format("killed after {:g} s", limit_s);
  }
  if (WIFSIGNALED(status)) return fmt::format("ended by signal {}", WTERMSIG(status));
  return WEXITSTATUS(status) == 0 ? "" : fmt::format("exit status {}", WEXITSTATUS(status));
}

}  // namespace nrl
