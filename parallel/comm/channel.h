#pragma once
// Point-to-point messages between pipeline neighbors, with an ordering rule that every backend can keep.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "parallel/comm/communicator.h"

namespace nrl::comm {

enum class Direction : uint8_t { send, receive };

/// One end of a channel, as requested from Channels. `peer`: another rank of the group. `lane`: several
/// channels may lead from one rank to another; their messages do not wait for each other.
struct ChannelEnd {
  int peer;
  Direction direction;
  int lane = 0;
};

/// One end of a FIFO from one rank to another: the k-th send matches the k-th receive, which must be of equal
/// size. A message waits only for earlier messages of the same channel: not for other channels (the reverse
/// direction and other lanes between the same ranks included) and not for collectives. A schedule that cannot
/// deadlock under this rule cannot deadlock on any backend.
///
/// A channel is a tag on mpi and staged, and a communicator of the two ranks on nccl, connected when it is
/// made: no message blocks the host when it is issued.
class Channel {
 public:
  int peer() const { return end_.peer; }
  Direction direction() const { return end_.direction; }
  int lane() const { return end_.lane; }

  /// Sending end only. Memory, stream and waiting as for Communicator::send_async.
  Handle send_async(ConstView data, const After& after = {});
  /// Receiving end only.
  Handle receive_async(View data, const After& after = {});

 private:
  friend class Channels;
  Channel(Communicator& carrier, const ChannelEnd& end, int rank_of_peer, int tag)
      : carrier_(carrier), end_(end), rank_of_peer_(rank_of_peer), tag_(tag) {}

  Communicator& carrier_;  // of the group, or of the two ranks
  ChannelEnd end_;
  int rank_of_peer_;  // in the carrier
  int tag_;
};

/// This rank's ends of the channels of a group.
class Channels {
 public:
  /// Collective over the group, where the two ranks of every channel must both request it. An error is one of
  /// all ranks. `group` must outlive the object and must carry no other messages with the tags max_tag - lane
  /// of the channels.
  Channels(Communicator& group, std::span<const ChannelEnd> ends) : Channels(group, ends, group) {}
  /// Collective over `parent`, which has all ranks of this group and of others that make channels at the same
  /// time: where channels are communicators of two ranks, they are split from `parent`, a channel of every
  /// pair at a time. `group` may be one for host memory then.
  Channels(Communicator& group, std::span<const ChannelEnd> ends, Communicator& parent);
  /// Collective like the constructor.
  ~Channels();
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  /// Adds registrations of the memory with the channels that are communicators of their own.
  void register_memory(void* data, size_t bytes, std::vector<std::unique_ptr<Registration>>& out) {
    for (const auto& pair : pairs_) out.push_back(pair->register_memory(data, bytes));
  }
  /// Communicator::set_dry() of the channels that are communicators of their own.
  void set_dry(bool dry) {
    for (const auto& pair : pairs_) pair->set_dry(dry);
  }
  /// The end that sends to `peer`, and the one that receives from it. Must have been requested (else an
  /// internal error).
  Channel& to(int peer, int lane = 0) { return find({peer, Direction::send, lane}); }
  Channel& from(int peer, int lane = 0) { return find({peer, Direction::receive, lane}); }

 private:
  Channel& find(const ChannelEnd& end);

  const Communicator& group_;
  std::vector<std::unique_ptr<Communicator>> pairs_;  // in the order they were made
  std::vector<Channel> channels_;
};

}  // namespace nrl::comm
