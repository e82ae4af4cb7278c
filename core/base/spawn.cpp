#include "core/base/spawn.h"

#include <utility>

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <spawn.h>

namespace nrl {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

}  // namespace

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

}  // namespace nrl
