// Two ends of a connection in one process: handshake, refusals, a broken connection, and a socket that leaves
// nothing.

#include "parallel/control/transport.h"

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

#include <spdlog/fmt/fmt.h>

#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::control;

namespace {

struct Recorded : TransportEvents {
  std::vector<Message> messages;
  int closed = 0, connected = 0;
  Closed::How how = Closed::How::ended;
  void on_message(size_t, const Message& message) override { messages.push_back(message); }
  void on_closed(size_t, Closed::How h) override { ++closed, how = h; }
  void on_connected(size_t) override { ++connected; }
};

Secret secret_of(int fill, uint32_t attempt = 1) {
  Secret secret;
  secret.key.fill(static_cast<std::byte>(fill));
  secret.attempt = attempt;
  return secret;
}

Message text_message(FrameType type, std::string_view text) {
  Message m;
  m.type = type;
  m.length = static_cast<uint16_t>(text.size());
  std::memcpy(m.payload.data(), text.data(), text.size());
  return m;
}

struct Pair {
  std::string run = fmt::format("transport-test-{}", getpid());
  Recorded parent_events, child_events;
  std::unique_ptr<Transport> parent, child;
  Address address;

  explicit Pair(bool local, const Secret& theirs = secret_of(1)) {
    const std::vector<int> nodes = {0, local ? 0 : 1};
    parent = std::make_unique<Transport>(make_topology(0, nodes), secret_of(1), run, 5_s);
    child = std::make_unique<Transport>(make_topology(1, nodes), theirs, run, 5_s);
    parent->listen_local();
    if (parent->has_remote_children()) address = parent->listen_remote(open_interface("127.0.0.1"));
    child->set_parent(address);
  }
  // Until both are complete, or for this long.
  bool run_for(Nanos time, bool until_complete = true) {
    const Nanos end = monotonic_now() + time;
    while (monotonic_now() < end) {
      parent->poll(2_ms, -1, parent_events);
      child->poll(2_ms, -1, child_events);
      if (until_complete && parent->complete() && child->complete()) return true;
    }
    return parent->complete() && child->complete();
  }
};

// The connected TCP socket of this process whose other end is at `port`.
int socket_to(uint16_t port) {
  for (int fd = 3; fd < 200; ++fd) {
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0 || peer.ss_family != AF_INET)
      continue;
    uint16_t theirs;
    std::memcpy(&theirs, reinterpret_cast<const char*>(&peer) + 2, sizeof theirs);
    if (theirs == port) return fd;
  }
  return -1;
}

}  // namespace

TEST_CASE("a parent and a child find each other, within a node and between nodes") {
  for (const bool local : {true, false}) {
    Pair pair(local);
    REQUIRE(pair.run_for(5_s));
    CHECK(!std::filesystem::exists(fmt::format("/dev/shm/nrl-{}/{}", geteuid(), pair.run)));
    for (int i = 0; i < 200; ++i) {
      pair.child->send(0, text_message(FrameType::suspect, fmt::format("up {}", i)));
      pair.parent->send(0, text_message(FrameType::verdict, std::string(900, 'v')));
    }
    pair.run_for(50_ms, false);
    REQUIRE(pair.parent_events.messages.size() == 200);
    CHECK(std::memcmp(pair.parent_events.messages[199].payload.data(), "up 199", 6) == 0);
    // The parent's queue holds fewer than 200 long ones; that closes the link instead of losing some of them.
    CHECK((pair.child_events.messages.size() == 200 || pair.parent_events.closed > 0));
    pair.child.reset();
    const Nanos end = monotonic_now() + 1_s;
    while (pair.parent_events.closed == 0 && monotonic_now() < end)
      pair.parent->poll(2_ms, -1, pair.parent_events);
    CHECK(pair.parent_events.closed == 1);
  }
}

TEST_CASE("another secret or attempt is refused, and strangers do no harm") {
  for (const Secret& theirs : {secret_of(2), secret_of(1, 2)}) {
    Pair pair(false, theirs);
    CHECK(!pair.run_for(300_ms));
    CHECK(pair.parent_events.messages.empty());
    CHECK(pair.parent_events.connected == 0);
  }
  Pair pair(false);
  std::vector<int> strangers;
  for (int i = 0; i < 70; ++i) {
    const int fd = connect_tcp(pair.address);
    REQUIRE(fd >= 0);
    pair.parent->poll(1_ms, -1, pair.parent_events);
    const std::string garbage(i % 2 == 0 ? 300 : 20, static_cast<char>(i));
    [[maybe_unused]] const ssize_t sent = ::send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL);
    strangers.push_back(fd);
  }
  CHECK(pair.run_for(5_s));
  for (int fd : strangers) close(fd);
}

TEST_CASE("a broken connection between nodes is made again") {
  Pair pair(false);
  REQUIRE(pair.run_for(5_s));
  CHECK(connect_tcp(pair.address) >= -1);  // no listener any more: refused
  for (int round = 1; round <= 3; ++round) {
    const int fd = socket_to(pair.address.port);
    REQUIRE(fd >= 0);
    shutdown(fd, SHUT_RDWR);
    pair.run_for(30_ms, false);
    CHECK(pair.run_for(2_s));
    CHECK(pair.parent_events.closed == round);
    CHECK(pair.child_events.closed == round);
    CHECK(pair.parent_events.connected == round + 1);
  }
  pair.child->send(0, text_message(FrameType::bye, ""));
  pair.run_for(30_ms, false);
  CHECK(pair.parent_events.messages.size() == 1);
}

TEST_CASE("bytes of a forger close a connection") {
  Pair pair(false);
  REQUIRE(pair.run_for(5_s));
  const int fd = socket_to(pair.address.port);
  const std::string forged(100, 'x');
  REQUIRE(::send(fd, forged.data(), forged.size(), MSG_NOSIGNAL) == 100);
  pair.run_for(20_ms, false);
  CHECK(pair.parent_events.closed == 1);
  CHECK(pair.parent_events.how == Closed::How::failed);
  CHECK(pair.parent_events.messages.empty());
}

TEST_CASE("a directory that others could write is not used") {
  const std::string run = fmt::format("transport-mode-{}", getpid());
  const std::filesystem::path directory = fmt::format("/dev/shm/nrl-{}/{}", geteuid(), run);
  std::filesystem::create_directories(directory);
  std::filesystem::permissions(directory.parent_path(), std::filesystem::perms::owner_all);
  std::filesystem::permissions(directory, std::filesystem::perms::all);
  LocalListener listener;
  CHECK_THROWS_AS(listener.open(run, 0, 1), Error);
  std::filesystem::remove(directory);
  std::error_code used;  // by another run
  std::filesystem::remove(directory.parent_path(), used);
  CHECK_THROWS_AS(open_interface("no-such-interface"), Error);
}
