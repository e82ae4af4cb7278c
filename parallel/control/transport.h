#pragma once
// The authenticated connections of one process to its neighbors in the tree.

#include <string>
#include <vector>

#include <poll.h>

#include "parallel/control/protocol.h"
#include "parallel/control/sockets.h"

namespace nrl::control {

/// Called by Transport::poll, in the order of the events.
class TransportEvents {
 public:
  virtual ~TransportEvents() = default;
  virtual void on_message(size_t link, const Message& message) = 0;
  virtual void on_closed(size_t link, Closed::How how) = 0;
  virtual void on_connected(size_t link) = 0;
};

/// The child connects, and again if the connection to another node breaks; the parent listens only while a
/// child is missing. Both sides prove that they know the secret: HELLO (nonce of the child), CHALLENGE (both
/// nonces), PROOF. An unauthenticated connection may send 256 bytes within 2 s. Allocates nothing after
/// construction and listen().
class Transport {
 public:
  Transport(const Topology& topology, const Secret& secret, std::string run, Nanos network_timeout);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  /// Opens the socket for children within the node, if there are any. Throws Error.
  void listen_local();
  /// Opens the port for children on other nodes; its address.
  Address listen_remote(uint32_t host);
  bool has_remote_children() const;
  void set_parent(const Address& address) { parent_ = address; }

  /// Waits for at most `timeout` for events or for `wake` to be readable, and handles all that have arrived.
  void poll(Nanos timeout, int wake, TransportEvents& events);
  /// A link that is not open, or whose queue is full, drops the message; a full queue also closes the link.
  void send(size_t link, const Message& message);
  bool complete() const;  ///< every link is open
  bool is_open(size_t link) const { return connections_[link].stage == Stage::open; }
  int last_error() const { return error_; }  ///< of the last attempt to reach the parent
  /// Closes the links between nodes, or all, for good. Links are renumbered; returns the topology that is
  /// left.
  const Topology& keep_local(bool links_within_node);
  /// Sends the rest, says that nothing follows and reads until the others have done the same, for at most
  /// `limit`.
  void drain(Nanos limit);

 private:
  enum class Stage : uint8_t { closed, connecting, greeted, challenged, open };
  struct Connection {
    int fd = -1;
    Stage stage = Stage::closed;
    bool local = false;
    bool dropped = false;    // must not be connected again
    bool failed = false;     // a send failed; the next poll closes it
    size_t link = SIZE_MAX;  // of a connection that was accepted: known after HELLO
    size_t allowed = 0;      // bytes that may still be read before authentication
    Nanos deadline = 0;      // of the handshake
    FrameReader reader;
    FrameWriter writer;
    Nonce nonce{};
    std::vector<std::byte> in, out;
    size_t in_size = 0, out_begin = 0, out_end = 0;
  };

  void update_listeners();
  void accept_all(int listener, bool local);
  void connect_parent(Nanos now);
  void send_hello(Connection& c);
  void handle(Connection& c, short ready, TransportEvents& events);
  bool read(Connection& c, TransportEvents& events, Closed::How& how);
  bool handle_handshake(Connection& c, const Message& message, TransportEvents& events);
  void adopt(Connection& c, TransportEvents& events);
  void close_link(Connection& c, Closed::How how, TransportEvents& events);
  void write(Connection& c, const Message& message);
  bool flush(Connection& c);
  void reset(Connection& c);
  bool is_accepted(const Connection& c) const {
    return &c >= accepted_.data() && &c < accepted_.data() + accepted_.size();
  }

  Topology topology_;
  Secret secret_;
  std::string run_;
  Nanos network_timeout_;
  std::vector<Connection> connections_;  // by link
  std::vector<Connection> accepted_;     // not authenticated yet
  LocalListener local_;
  Address address_, parent_;
  int listener_ = -1;
  Nanos retry_at_ = 0, retry_delay_ = 0;
  int error_ = 0;
  std::vector<pollfd> polled_;
  std::vector<Connection*> polled_connections_;
};

}  // namespace nrl::control
