#pragma once
// Sockets of the control plane: within a node (unix.cpp) and between nodes (tcp.cpp), and facts of processes.
// All sockets are non-blocking and closed on exec. Functions named `open_*` allocate, the others do not.

#include <cstdint>
#include <optional>
#include <string>

#include <sys/types.h>

#include "parallel/control/frame.h"

namespace nrl::control {

Nanos monotonic_now();

/// A socket in /dev/shm/nrl-UID/RUN, which only this user can open. Removed, with the directories if they are
/// empty, by remove() and the destructor.
class LocalListener {
 public:
  LocalListener() = default;
  ~LocalListener() { remove(); }
  LocalListener(const LocalListener&) = delete;
  LocalListener& operator=(const LocalListener&) = delete;
  /// Throws Error (Exit::unavailable) if the directory is not ours alone or the socket cannot be made.
  void open(const std::string& run, int node, int backlog);
  void remove();
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
  std::string path_;
};
/// -1 while there is no listener yet; errno tells.
int connect_local(const std::string& run, int node);
/// True if the other end is a process of our user.
bool is_own_user(int fd);

/// IPv4, both in network byte order.
struct Address {
  uint32_t host = 0;
  uint16_t port = 0;
};
std::string text_of(const Address& address);
/// Address of an interface by its name or address; "": of the default route, else of the first interface that
/// is up. Throws Error (Exit::unavailable) if there is none.
uint32_t open_interface(const std::string& interface);
/// Listens at `address`; a port of 0 is chosen and returned in it. -1 with errno.
int listen_tcp(Address& address, int backlog);
/// Begins to connect; the result comes with POLLOUT and socket_error(). -1 with errno.
int connect_tcp(const Address& address);
void set_tcp_options(int fd, Nanos network_timeout);
int accept_connection(int listener);
int socket_error(int fd);

/// Number of the own process-id namespace.
uint64_t pid_namespace();
/// The same on ranks that share /dev/shm, and only there.
uint64_t host_identity();

}  // namespace nrl::control
