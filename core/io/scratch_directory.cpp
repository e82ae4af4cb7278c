#include "core/io/scratch_directory.h"

#include <cstdlib>

#include <fcntl.h>
#include <unistd.h>

#include <spawn.h>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/io/atomic_file.h"

namespace nrl {
namespace {

// Waits for the end of its input. Other ranks may still write while they are ended, so it tries again.
constexpr const char* helper_script =
    "trap '' HUP INT QUIT TERM\n"
    "while read -r _; do :; done\n"
    "for _ in 1 2 3 4 5; do rm -rf -- \"$1\" && sleep 1 && ! test -e \"$1\" && exit; done";

}  // namespace

std::string scratch_parent() {
  const char* const set = std::getenv("TMPDIR");
  return set && *set ? set : "/tmp";
}

ScratchDirectory::ScratchDirectory(const std::string& parent, std::string_view prefix)
    : path_(join_path(parent, std::string(prefix) + random_nonce())) {
  make_directory(path_);
  start_helper();
}

ScratchDirectory::~ScratchDirectory() {
  try {
    remove_tree(path_);
  } catch (const Error& e) {
    log::warn("{}", e.what());
  }
  if (alive_ >= 0) ::close(alive_);
}

// Without a helper the directory is only removed by the destructor.
void ScratchDirectory::start_helper() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return;
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, ends[0], STDIN_FILENO);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  // A launcher waits until the connections of its ranks are closed.
  posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
  std::string shell = "sh", option = "-c", script = helper_script;
  char* const arguments[] = {shell.data(), option.data(), script.data(), shell.data(), path_.data(), nullptr};
  pid_t helper = -1;
  if (::posix_spawn(&helper, "/bin/sh", &files, &attributes, arguments, environ) == 0)
    alive_ = ends[1];
  else
    ::close(ends[1]);
  ::close(ends[0]);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
}

}  // namespace nrl
