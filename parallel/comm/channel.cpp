#include "parallel/comm/channel.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/error.h"

namespace nrl::comm {

Handle Channel::send_async(ConstView data, const After& after) {
  NRL_CHECK(direction() == Direction::send, "send in a channel from rank {} of {}", peer(), carrier_.label());
  return carrier_.send_async(data, rank_of_peer_, tag_, after);
}

Handle Channel::receive_async(View data, const After& after) {
  NRL_CHECK(direction() == Direction::receive, "receive in a channel to rank {} of {}", peer(),
            carrier_.label());
  return carrier_.recv_async(data, rank_of_peer_, tag_, after);
}

Channels::Channels(Communicator& group, std::span<const ChannelEnd> ends) : group_(group) {
  // All ranks create their channels in (sender, receiver, lane) order, so creation cannot deadlock.
  const auto ranks = [&](const ChannelEnd& end) {
    return end.direction == Direction::send ? std::array{group.rank(), end.peer}
                                            : std::array{end.peer, group.rank()};
  };
  const auto key = [&](const ChannelEnd& end) { return std::pair(ranks(end), end.lane); };
  std::vector<ChannelEnd> order(ends.begin(), ends.end());
  std::sort(order.begin(), order.end(),
            [&](const ChannelEnd& a, const ChannelEnd& b) { return key(a) < key(b); });
  for (size_t i = 0; i < order.size(); ++i) {
    const auto [peer, direction, lane] = order[i];
    NRL_CHECK(peer >= 0 && peer < group.size() && peer != group.rank(), "channel on {}: no other rank {}",
              group.label(), peer);
    NRL_CHECK(lane >= 0 && lane <= max_tag, "channel on {}: lane {}", group.label(), lane);
    NRL_CHECK(i == 0 || key(order[i]) != key(order[i - 1]), "channel on {}: rank {} twice", group.label(),
              peer);
  }
  for (const ChannelEnd& end : order) {
    if (!group.single_fifo()) {
      channels_.push_back(Channel(group, end, end.peer, max_tag - end.lane));
      continue;
    }
    const auto [sender, receiver] = ranks(end);
    std::string name = fmt::format("{} {}>{}", group.name(), sender, receiver);
    if (end.lane > 0) name += fmt::format(" lane {}", end.lane);
    pairs_.push_back(group.subgroup(ranks(end), name));
    const int rank_of_peer = end.direction == Direction::send ? 1 : 0;
    channels_.push_back(Channel(*pairs_.back(), end, rank_of_peer, 0));
  }
}

Channels::~Channels() {
  for (std::unique_ptr<Communicator>& pair : pairs_) pair.reset();
}

Channel& Channels::find(const ChannelEnd& end) {
  const auto at = std::find_if(channels_.begin(), channels_.end(), [&](const Channel& c) {
    return c.peer() == end.peer && c.direction() == end.direction && c.lane() == end.lane;
  });
  NRL_CHECK(at != channels_.end(), "no channel {} rank {} of {} was requested",
            end.direction == Direction::send ? "to" : "from", end.peer, group_.label());
  return *at;
}

}  // namespace nrl::comm
