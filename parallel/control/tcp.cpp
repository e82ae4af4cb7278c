#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include <sys/socket.h>
#include <unistd.h>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <spdlog/fmt/fmt.h>

#include "core/base/error.h"
#include "parallel/control/sockets.h"

namespace nrl::control {

namespace {

sockaddr_in ipv4(const Address& address) {
  sockaddr_in out{};
  out.sin_family = AF_INET;
  out.sin_addr.s_addr = address.host;
  out.sin_port = address.port;
  return out;
}

// Address from which packets to the outside leave; 0 without such a route. Sends nothing.
uint32_t default_route() {
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return 0;
  const sockaddr_in outside = ipv4({htonl(0xC0000201), htons(9)});  // 192.0.2.1 (RFC 5737)
  sockaddr_in own{};
  socklen_t length = sizeof own;
  const bool known = connect(fd, reinterpret_cast<const sockaddr*>(&outside), sizeof outside) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0;
  close(fd);
  return known ? own.sin_addr.s_addr : 0;
}

}  // namespace

std::string text_of(const Address& address) {
  std::array<char, INET_ADDRSTRLEN> text{};
  inet_ntop(AF_INET, &address.host, text.data(), text.size());
  return fmt::format("{}:{}", text.data(), ntohs(address.port));
}

uint32_t open_interface(const std::string& interface) {
  if (interface.empty())
    if (const uint32_t host = default_route(); host != 0) return host;
  in_addr wanted{};
  const bool is_address = inet_pton(AF_INET, interface.c_str(), &wanted) == 1;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) == 0) {
    const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, freeifaddrs);
    for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
      if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET || (i->ifa_flags & IFF_UP) == 0)
        continue;
      const uint32_t host = reinterpret_cast<const sockaddr_in*>(i->ifa_addr)->sin_addr.s_addr;
      if (is_address          ? host == wanted.s_addr
          : interface.empty() ? (i->ifa_flags & IFF_LOOPBACK) == 0
                              : interface == i->ifa_name)
        return host;
    }
  }
  fail(Exit::unavailable,
       "reliability.interface: {}. Fix: name an interface or an IPv4 address of every node",
       interface.empty() ? std::string("this node has no network interface that is up")
                         : fmt::format("this node has no interface '{}'", interface));
}

int listen_tcp(Address& address, int backlog) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in own = ipv4(address);
  socklen_t length = sizeof own;
  if (bind(fd, reinterpret_cast<const sockaddr*>(&own), sizeof own) == 0 && listen(fd, backlog) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0) {
    address.port = own.sin_port;
    return fd;
  }
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

int connect_tcp(const Address& address) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const sockaddr_in other = ipv4(address);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&other), sizeof other) == 0 || errno == EINPROGRESS)
    return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

void set_tcp_options(int fd, Nanos network_timeout) {
  const int on = 1;
  const unsigned milliseconds = static_cast<unsigned>(network_timeout / 1'000'000);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
}

int accept_connection(int listener) {
  return accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
}

int socket_error(int fd) {
  int error = 0;
  socklen_t length = sizeof error;
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

}  // namespace nrl::control
