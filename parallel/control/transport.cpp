#include "parallel/control/transport.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/socket.h>
#include <unistd.h>

#include "core/base/error.h"

namespace nrl::control {

namespace {

constexpr Nanos handshake_time = 2_s, first_retry = 50_ms, last_retry = 1_s;
constexpr size_t most_accepted = 64, unauthenticated_bytes = 256;
constexpr size_t in_bytes = 4 * max_frame, out_bytes = 64 << 10, up_bytes = 128 << 10;

Message handshake_message(FrameType type, const Nonce* first, const Nonce* second) {
  Message m;
  m.type = type;
  for (const Nonce* nonce : {first, second})
    if (nonce != nullptr) {
      std::memcpy(m.payload.data() + m.length, nonce->data(), nonce->size());
      m.length = static_cast<uint16_t>(m.length + nonce->size());
    }
  return m;
}

// The frame that begins here, whose length is in its header.
size_t frame_bytes(const std::byte* frame) {
  uint16_t payload;
  std::memcpy(&payload, frame + 6, sizeof payload);
  return header_bytes + payload + mac_bytes;
}

}  // namespace

Transport::Transport(const Topology& topology, const Secret& secret, std::string run, Nanos network_timeout)
    : topology_(topology), secret_(secret), run_(std::move(run)), network_timeout_(network_timeout) {
  protect(std::as_writable_bytes(std::span(&secret_, 1)));
  connections_.resize(topology.links.size());
  bool children = false;
  for (size_t i = 0; i < connections_.size(); ++i) {
    Connection& c = connections_[i];
    c.link = i;
    c.local = topology.links[i].local;
    c.in.resize(in_bytes);
    c.out.resize(topology.links[i].up ? up_bytes : out_bytes);
    children |= !topology.links[i].up;
  }
  accepted_.resize(children ? most_accepted : 0);
  for (Connection& c : accepted_) {
    c.in.resize(unauthenticated_bytes);
    c.out.resize(unauthenticated_bytes);
  }
  polled_.resize(connections_.size() + accepted_.size() + 3);
  polled_connections_.resize(polled_.size());
}

Transport::~Transport() {
  for (std::vector<Connection>* all : {&connections_, &accepted_})
    for (Connection& c : *all) reset(c);
  if (listener_ >= 0) close(listener_);
  forget(std::as_writable_bytes(std::span(&secret_, 1)));
}

void Transport::listen_local() {
  const auto count = std::ranges::count_if(topology_.links, [](const Link& l) { return l.local && !l.up; });
  if (count > 0) local_.open(run_, topology_.node_of_rank(topology_.rank), static_cast<int>(count) + 8);
}

bool Transport::has_remote_children() const {
  return std::ranges::any_of(topology_.links, [](const Link& l) { return !l.local && !l.up; });
}

Address Transport::listen_remote(uint32_t host) {
  address_ = {host, 0};
  listener_ = listen_tcp(address_, tree_arity + 8);
  if (listener_ < 0)
    fail(Exit::unavailable, "{}: cannot listen for the control plane: {}. Fix: set reliability.interface",
         text_of(address_), std::strerror(errno));
  return address_;
}

bool Transport::complete() const {
  return std::ranges::all_of(connections_,
                             [](const Connection& c) { return c.stage == Stage::open || c.dropped; });
}

const Topology& Transport::keep_local(bool links_within_node) {
  const auto goes = [&](bool local) { return !local || !links_within_node; };
  for (Connection& c : connections_)
    if (goes(c.local)) reset(c);
  std::erase_if(connections_, [&](const Connection& c) { return goes(c.local); });
  std::erase_if(topology_.links, [&](const Link& l) { return goes(l.local); });
  for (size_t i = 0; i < connections_.size(); ++i) connections_[i].link = i;
  topology_.nodes = topology_.depth = 1;
  address_ = {};
  if (listener_ >= 0) close(std::exchange(listener_, -1));
  return topology_;
}

// Listens exactly while a child is missing; on one node, the socket is gone once all have connected.
void Transport::update_listeners() {
  const auto missing = [&](bool local) {
    return std::ranges::any_of(connections_, [&](const Connection& c) {
      return c.local == local && !topology_.links[c.link].up && c.stage != Stage::open && !c.dropped;
    });
  };
  if (local_.fd() >= 0 && !missing(true)) local_.remove();
  if (address_.port == 0) return;
  const bool wanted = missing(false);
  if (wanted && listener_ < 0) listener_ = listen_tcp(address_, tree_arity + 8);
  if (!wanted && listener_ >= 0) close(std::exchange(listener_, -1));
}

void Transport::accept_all(int listener, bool local) {
  for (int fd = accept_connection(listener); fd >= 0; fd = accept_connection(listener)) {
    const auto slot = std::ranges::find_if(accepted_, [](const Connection& c) { return c.fd < 0; });
    if (slot == accepted_.end() || (local && !is_own_user(fd))) {
      close(fd);
      continue;
    }
    if (!local) set_tcp_options(fd, network_timeout_);
    slot->fd = fd;
    slot->local = local;
    slot->link = SIZE_MAX;
    slot->stage = Stage::greeted;
    slot->allowed = unauthenticated_bytes;
    slot->deadline = monotonic_now() + handshake_time;
    slot->reader = FrameReader(greeting_key(secret_), FrameReader::any_sender, secret_.attempt);
    slot->writer = FrameWriter(greeting_key(secret_), static_cast<uint32_t>(topology_.rank), secret_.attempt);
  }
}

void Transport::connect_parent(Nanos now) {
  if (connections_.empty() || !topology_.links[0].up) return;
  Connection& c = connections_[0];
  if (c.stage != Stage::closed || c.dropped || now < retry_at_) return;
  retry_delay_ = std::clamp(2 * retry_delay_, first_retry, last_retry);
  retry_at_ = now + retry_delay_;
  const int fd = c.local ? connect_local(run_, topology_.node_of_rank(topology_.rank)) : connect_tcp(parent_);
  if (fd < 0) {
    error_ = errno;
    return;
  }
  if (c.local && !is_own_user(fd)) {
    error_ = EPERM;
    close(fd);
    return;
  }
  c.fd = fd;
  c.stage = Stage::connecting;
  c.deadline = now + handshake_time;
  if (c.local) send_hello(c);
}

void Transport::send_hello(Connection& c) {
  if (!c.local) set_tcp_options(c.fd, network_timeout_);
  const Key key = greeting_key(secret_);
  c.reader = FrameReader(key, static_cast<uint32_t>(topology_.links[c.link].rank), secret_.attempt);
  c.writer = FrameWriter(key, static_cast<uint32_t>(topology_.rank), secret_.attempt);
  fill_random(c.nonce);
  c.stage = Stage::greeted;
  write(c, handshake_message(FrameType::hello, &c.nonce, nullptr));
}

// One message of a handshake; false ends the connection.
bool Transport::handle_handshake(Connection& c, const Message& message, TransportEvents& events) {
  const auto own = static_cast<uint32_t>(topology_.rank);
  if (!is_accepted(c)) {  // the child's side
    Nonce echoed, theirs;
    if (message.type != FrameType::challenge || message.length != 2 * sizeof(Nonce)) return false;
    std::memcpy(echoed.data(), message.payload.data(), sizeof(Nonce));
    std::memcpy(theirs.data(), message.payload.data() + sizeof(Nonce), sizeof(Nonce));
    if (echoed != c.nonce) return false;
    const auto parent = static_cast<uint32_t>(topology_.links[0].rank);
    c.reader = FrameReader(link_key(secret_, Direction::down, own, parent, c.nonce, theirs), parent,
                           secret_.attempt);
    c.writer =
        FrameWriter(link_key(secret_, Direction::up, own, parent, c.nonce, theirs), own, secret_.attempt);
    write(c, handshake_message(FrameType::proof, nullptr, nullptr));
    c.stage = Stage::open;
    retry_delay_ = 0;
    events.on_connected(c.link);
    return true;
  }
  if (c.stage == Stage::challenged) {
    if (message.type != FrameType::proof || message.length != 0) return false;
    adopt(c, events);
    return true;
  }
  const uint32_t child = c.reader.sender();
  const auto link = std::ranges::find_if(topology_.links, [&](const Link& l) {
    return !l.up && l.local == c.local && static_cast<uint32_t>(l.rank) == child;
  });
  if (message.type != FrameType::hello || message.length != sizeof(Nonce) || link == topology_.links.end())
    return false;
  c.link = static_cast<size_t>(link - topology_.links.begin());
  Nonce theirs;
  std::memcpy(theirs.data(), message.payload.data(), sizeof theirs);
  fill_random(c.nonce);
  write(c, handshake_message(FrameType::challenge, &theirs, &c.nonce));
  c.stage = Stage::challenged;
  c.reader =
      FrameReader(link_key(secret_, Direction::up, child, own, theirs, c.nonce), child, secret_.attempt);
  c.writer =
      FrameWriter(link_key(secret_, Direction::down, child, own, theirs, c.nonce), own, secret_.attempt);
  return true;
}

// Makes an accepted connection the link of its child.
void Transport::adopt(Connection& c, TransportEvents& events) {
  Connection& link = connections_[c.link];
  if (link.dropped) return reset(c);
  if (link.stage == Stage::open) close_link(link, Closed::How::reset, events);  // the child noticed first
  link.fd = std::exchange(c.fd, -1);
  link.reader = c.reader;
  link.writer = c.writer;
  link.stage = Stage::open;
  events.on_connected(link.link);
}

void Transport::reset(Connection& c) {
  if (c.fd >= 0) close(std::exchange(c.fd, -1));
  c.stage = Stage::closed;
  c.failed = false;
  c.in_size = c.out_begin = c.out_end = 0;
}

void Transport::close_link(Connection& c, Closed::How how, TransportEvents& events) {
  const bool was_open = c.stage == Stage::open;
  reset(c);
  if (is_accepted(c)) return;
  if (topology_.links[c.link].up && was_open) {
    retry_at_ = monotonic_now() + first_retry;  // time for the parent to listen
    if (c.local) c.dropped = true;              // within a node the end is final
  }
  if (was_open) events.on_closed(c.link, how);
}

void Transport::write(Connection& c, const Message& message) {
  if (c.out.size() - c.out_end < max_frame && c.out_begin > 0) {
    std::memmove(c.out.data(), c.out.data() + c.out_begin, c.out_end - c.out_begin);
    c.out_end -= std::exchange(c.out_begin, 0);
  }
  const size_t needed = header_bytes + message.length + mac_bytes;
  std::array<std::byte, max_frame> frame;
  if (c.out.size() - c.out_end < needed) {
    c.failed = true;
    return;
  }
  c.writer.write(message, monotonic_now(), frame);
  std::memcpy(c.out.data() + c.out_end, frame.data(), needed);
  c.out_end += needed;
  if (!flush(c)) c.failed = true;
}

// False if the connection is broken. A local socket takes one frame a call.
bool Transport::flush(Connection& c) {
  while (c.out_begin < c.out_end) {
    const size_t left = c.out_end - c.out_begin;
    const size_t size = c.local ? frame_bytes(c.out.data() + c.out_begin) : left;
    const ssize_t sent = ::send(c.fd, c.out.data() + c.out_begin, size, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR || errno == EWOULDBLOCK || errno == ENOBUFS;
    c.out_begin += static_cast<size_t>(sent);
  }
  c.out_begin = c.out_end = 0;
  return true;
}

void Transport::send(size_t link, const Message& message) {
  if (connections_[link].stage == Stage::open) write(connections_[link], message);
}

// Reads and handles everything there is; false if the connection has ended.
bool Transport::read(Connection& c, TransportEvents& events, Closed::How& how) {
  for (;;) {
    const bool accepted = is_accepted(c);
    size_t room = c.in.size() - c.in_size;
    if (accepted) room = std::min(room, c.allowed);
    how = Closed::How::failed;
    if (room == 0) return false;
    const ssize_t n = recv(c.fd, c.in.data() + c.in_size, room, 0);
    if (n < 0) {
      if (errno == EAGAIN || errno == EINTR || errno == EWOULDBLOCK) return true;
      if (c.stage != Stage::open && !accepted) error_ = errno;
      if (errno == ECONNRESET || errno == EPIPE) how = Closed::How::reset;
      return false;
    }
    if (n == 0) {
      how = Closed::How::ended;
      if (c.stage != Stage::open && !accepted) error_ = ECONNRESET;
      return false;
    }
    c.in_size += static_cast<size_t>(n);
    if (accepted) c.allowed -= static_cast<size_t>(n);
    size_t begin = 0;
    for (;;) {
      Message message;
      size_t used = 0;
      const ReadResult result = c.reader.read({c.in.data() + begin, c.in_size - begin}, message, used);
      if (result == ReadResult::refused) return false;
      if (result == ReadResult::incomplete) break;
      begin += used;
      if (c.stage == Stage::open) {
        events.on_message(c.link, message);
      } else if (!handle_handshake(c, message, events)) {
        return false;
      } else if (c.fd < 0) {  // adopted, with the bytes after the proof
        if (connections_[c.link].stage == Stage::open) {
          Connection& link = connections_[c.link];
          link.in_size = c.in_size - begin;
          std::memcpy(link.in.data(), c.in.data() + begin, link.in_size);
        }
        reset(c);
        return true;
      }
    }
    std::memmove(c.in.data(), c.in.data() + begin, c.in_size - begin);
    c.in_size -= begin;
  }
}

void Transport::handle(Connection& c, short ready, TransportEvents& events) {
  if (c.fd < 0) return;  // closed by an earlier event
  Closed::How how = Closed::How::failed;
  if (c.stage == Stage::connecting) {
    if (const int error = socket_error(c.fd); error != 0) {
      error_ = error;
      return reset(c);
    }
    send_hello(c);
  }
  if ((ready & POLLOUT) != 0 && !flush(c)) c.failed = true;
  if ((ready & (POLLIN | POLLHUP | POLLERR)) != 0 && !read(c, events, how)) close_link(c, how, events);
}

void Transport::poll(Nanos timeout, int wake, TransportEvents& events) {
  for (int round = 0; round < 64; ++round) {
    const Nanos now = monotonic_now();
    Nanos wait = round == 0 ? std::max<Nanos>(timeout, 0) : 0;
    update_listeners();
    connect_parent(now);
    nfds_t count = 0;
    const auto add = [&](int fd, short wanted, Connection* c) {
      polled_[count] = {fd, wanted, 0};
      polled_connections_[count++] = c;
    };
    add(wake, POLLIN, nullptr);
    if (local_.fd() >= 0) add(local_.fd(), POLLIN, nullptr);
    if (listener_ >= 0) add(listener_, POLLIN, nullptr);
    for (std::vector<Connection>* all : {&connections_, &accepted_})
      for (Connection& c : *all) {
        if (c.fd >= 0 && c.stage != Stage::open && now >= c.deadline) {
          if (!is_accepted(c)) error_ = ETIMEDOUT;
          reset(c);
        }
        // A broken connection is read to its end first.
        if (c.fd >= 0 && std::exchange(c.failed, false)) {
          Closed::How how = Closed::How::failed;
          read(c, events, how);
          if (c.fd >= 0) close_link(c, how, events);
        }
        if (c.fd < 0) continue;
        if (c.stage != Stage::open) wait = std::min(wait, c.deadline - now);
        const bool writes = c.stage == Stage::connecting || c.out_begin < c.out_end;
        add(c.fd, static_cast<short>(POLLIN | (writes ? POLLOUT : 0)), &c);
      }
    if (!connections_.empty() && topology_.links[0].up && connections_[0].stage == Stage::closed &&
        !connections_[0].dropped)
      wait = std::min(wait, std::max<Nanos>(retry_at_ - now, 0));
    const int ready = ::poll(polled_.data(), count, static_cast<int>((wait + 999'999) / 1'000'000));
    if (ready <= 0) return;
    for (nfds_t i = 1; i < count; ++i) {
      if (polled_[i].revents == 0) continue;
      if (polled_connections_[i] != nullptr)
        handle(*polled_connections_[i], polled_[i].revents, events);
      else if (polled_[i].fd == local_.fd() || polled_[i].fd == listener_)
        accept_all(polled_[i].fd, polled_[i].fd == local_.fd());
    }
    if (polled_[0].revents != 0 && ready == 1) return;
  }
}

void Transport::drain(Nanos limit) {
  struct Ignored : TransportEvents {
    void on_message(size_t, const Message&) override {}
    void on_closed(size_t, Closed::How) override {}
    void on_connected(size_t) override {}
  } ignored;
  const Nanos end = monotonic_now() + limit;
  for (Connection& c : connections_)
    if (c.fd >= 0 && flush(c)) shutdown(c.fd, SHUT_WR);
  for (Connection& c : connections_) c.dropped = true;
  const auto open = [](const Connection& c) { return c.fd >= 0; };
  for (Nanos now = monotonic_now(); now < end && std::ranges::any_of(connections_, open);
       now = monotonic_now())
    poll(std::min(end - now, 20_ms), -1, ignored);
}

}  // namespace nrl::control
