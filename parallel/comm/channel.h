#pragma once
// Messages between neighbors of a pipeline, under the one rule that all backends can keep.

#include "parallel/comm/communicator.h"

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace nrl::comm {

enum class Direction : uint8_t { send, receive };

/// What a rank asks Channels for: `peer` is a rank of the group, another one than this.
struct ChannelEnd {
  int peer;
  Direction direction;
};

/// One end of a FIFO from one rank to another: the k-th send of the one meets the k-th receive of the other,
/// which must be of equal size. A message waits for the messages before it in the same channel and for
/// nothing else: not for other channels, such as the one between the same ranks the other way, and not for
/// collectives. A schedule that cannot deadlock under this rule cannot deadlock on any backend.
///
/// On mpi and staged a channel is a tag, on nccl a communicator of the two ranks.
class Channel {
 public:
  int peer() const { return peer_; }
  Direction direction() const { return direction_; }

  /// For a sending end. Memory, stream and waiting as for Communicator::send_async.
  Handle send_async(ConstView data, const After& after = {});
  /// For a receiving end.
  Handle receive_async(View data, const After& after = {});

 private:
  friend class Channels;
  Channel(Communicator& carrier, int peer, Direction direction, int rank_of_peer, int tag)
      : carrier_(carrier), peer_(peer), direction_(direction), rank_of_peer_(rank_of_peer), tag_(tag) {}

  Communicator& carrier_;  // of the group, or of the two ranks
  int peer_;
  Direction direction_;
  int rank_of_peer_;  // in the carrier
  int tag_;
};

/// This rank's ends of the channels of a group.
class Channels {
 public:
  /// Collective over the two ranks of every channel, which must both name it: all ranks that channels connect
  /// make one object each. `group` must outlive it and must carry no other messages with the tag kMaxTag.
  Channels(Communicator& group, std::span<const ChannelEnd> ends);
  /// Collective as the constructor.
  ~Channels();
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  /// The end that sends to `peer`, and the one that receives from it; an internal error where not asked for.
  Channel& to(int peer) { return find(peer, Direction::send); }
  Channel& from(int peer) { return find(peer, Direction::receive); }

 private:
  Channel& find(int peer, Direction direction);

  const Communicator& group_;
  std::vector<std::unique_ptr<Communicator>> pairs_;  // in the order they were made
  std::vector<Channel> channels_;
};

}  // namespace nrl::comm
