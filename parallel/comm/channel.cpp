#include "parallel/comm/channel.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/error.h"

namespace nrl::comm {

Handle Channel::send_async(ConstView data, const After& after) {
  NRL_CHECK(direction_ == Direction::send, "send in a channel from rank {} of {}", peer_, carrier_.label());
  return carrier_.send_async(data, rank_of_peer_, tag_, after);
}

Handle Channel::receive_async(View data, const After& after) {
  NRL_CHECK(direction_ == Direction::receive, "receive in a channel to rank {} of {}", peer_,
            carrier_.label());
  return carrier_.recv_async(data, rank_of_peer_, tag_, after);
}

Channels::Channels(Communicator& group, std::span<const ChannelEnd> ends) : group_(group) {
  // All ranks create their channels in (sender, receiver) order, so creation cannot deadlock.
  const auto ranks = [&](const ChannelEnd& end) {
    return end.direction == Direction::send ? std::array{group.rank(), end.peer}
                                            : std::array{end.peer, group.rank()};
  };
  std::vector<ChannelEnd> order(ends.begin(), ends.end());
  std::sort(order.begin(), order.end(),
            [&](const ChannelEnd& a, const ChannelEnd& b) { return ranks(a) < ranks(b); });
  for (size_t i = 0; i < order.size(); ++i) {
    const auto [peer, direction] = order[i];
    NRL_CHECK(peer >= 0 && peer < group.size() && peer != group.rank(), "channel on {}: no other rank {}",
              group.label(), peer);
    NRL_CHECK(i == 0 || ranks(order[i]) != ranks(order[i - 1]), "channel on {}: rank {} twice", group.label(),
              peer);
  }
  for (const ChannelEnd& end : order) {
    if (!group.single_fifo()) {
      channels_.push_back(Channel(group, end.peer, end.direction, end.peer, max_tag));
      continue;
    }
    const auto [sender, receiver] = ranks(end);
    pairs_.push_back(group.subgroup(ranks(end), fmt::format("{} {}>{}", group.name(), sender, receiver)));
    const int rank_of_peer = end.direction == Direction::send ? 1 : 0;
    channels_.push_back(Channel(*pairs_.back(), end.peer, end.direction, rank_of_peer, 0));
  }
}

Channels::~Channels() {
  for (std::unique_ptr<Communicator>& pair : pairs_) pair.reset();
}

Channel& Channels::find(int peer, Direction direction) {
  const auto at = std::find_if(channels_.begin(), channels_.end(), [&](const Channel& c) {
    return c.peer() == peer && c.direction() == direction;
  });
  NRL_CHECK(at != channels_.end(), "no channel {} rank {} of {} was requested",
            direction == Direction::send ? "to" : "from", peer, group_.label());
  return *at;
}

}  // namespace nrl::comm
