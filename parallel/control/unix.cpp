#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <spdlog/fmt/fmt.h>

#include "core/base/error.h"
#include "parallel/control/sockets.h"

namespace nrl::control {

namespace {

constexpr const char* memory_directory = "/dev/shm";

std::string user_directory() {
  return fmt::format("{}/nrl-{}", memory_directory, geteuid());
}
std::string run_directory(const std::string& run) {
  return fmt::format("{}/{}", user_directory(), run);
}
std::string socket_path(const std::string& run, int node) {
  return fmt::format("{}/control-{}", run_directory(run), node);
}

// True if the directory exists now; it must be ours and closed to others. Another run may remove an empty
// one.
bool make_private(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    if (errno == ENOENT) return false;
    fail(Exit::unavailable,
         "{}: cannot create the directory of the control plane: {}. Fix: reliability.control: off", path,
         std::strerror(errno));
  }
  struct stat facts {};
  if (lstat(path.c_str(), &facts) != 0) return false;
  if (!S_ISDIR(facts.st_mode) || facts.st_uid != geteuid() || (facts.st_mode & 077) != 0)
    fail(Exit::unavailable, "{}: not a directory of this user with mode 0700. Fix: remove it", path);
  return true;
}

bool fill_address(const std::string& path, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return false;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  return true;
}

int local_socket() {
  return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}

// Reads a small file without allocation; the length, or -1.
ssize_t read_file(const char* path, std::span<char> buffer) {
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  const ssize_t n = ::read(fd, buffer.data(), buffer.size() - 1);
  close(fd);
  if (n >= 0) buffer[static_cast<size_t>(n)] = '\0';
  return n;
}

}  // namespace

Nanos monotonic_now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<Nanos>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void LocalListener::open(const std::string& run, int node, int backlog) {
  const std::string path = socket_path(run, node);
  sockaddr_un address;
  if (!fill_address(path, address)) fail(Exit::unavailable, "{}: the path of a socket is too long", path);
  for (int attempt = 0; attempt < 100; ++attempt) {
    if (!make_private(user_directory()) || !make_private(run_directory(run))) continue;
    const int fd = local_socket();
    if (fd < 0) break;
    unlink(path.c_str());  // of an earlier attempt that was killed
    if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
        chmod(path.c_str(), 0600) == 0 && listen(fd, backlog) == 0) {
      fd_ = fd;
      path_ = path;
      return;
    }
    const int error = errno;
    close(fd);
    errno = error;
    if (error != ENOENT) break;
  }
  fail(Exit::unavailable,
       "{}: cannot create the socket of the control plane: {}. Fix: reliability.control: off", path,
       std::strerror(errno));
}

void LocalListener::remove() {
  if (fd_ < 0) return;
  close(std::exchange(fd_, -1));
  unlink(path_.c_str());
  for (int level = 0; level < 2; ++level) {  // directories that other runs use are not empty
    path_.resize(path_.rfind('/'));
    if (rmdir(path_.c_str()) != 0) return;
  }
}

int connect_local(const std::string& run, int node) {
  sockaddr_un address;
  if (!fill_address(socket_path(run, node), address)) return errno = ENAMETOOLONG, -1;
  struct stat facts {};
  if (lstat(run_directory(run).c_str(), &facts) != 0) return -1;
  if (!S_ISDIR(facts.st_mode) || facts.st_uid != geteuid()) return errno = EPERM, -1;
  const int fd = local_socket();
  if (fd < 0) return -1;
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

bool is_own_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

uint64_t pid_namespace() {
  struct stat facts {};
  return stat("/proc/self/ns/pid", &facts) == 0 ? facts.st_ino : 0;
}

uint64_t host_identity() {
  std::array<char, 128> text{};
  const ssize_t n = read_file("/proc/sys/kernel/random/boot_id", text);
  struct stat facts {};
  if (stat(memory_directory, &facts) != 0) facts.st_dev = static_cast<dev_t>(getpid());
  const size_t used = n > 0 ? static_cast<size_t>(n) : 0;
  return digest(std::as_bytes(std::span(text.data(), used))) ^ facts.st_dev;
}

}  // namespace nrl::control
