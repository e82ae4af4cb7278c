#include "parallel/comm/channel.h"

#include <algorithm>
#include <compare>
#include <map>
#include <sstream>
#include <string>

#include "core/base/error.h"
#include "parallel/comm/agreement.h"

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

namespace {

/// A channel, by ranks of the group.
struct Route {
  int sender, receiver, lane;
  auto operator<=>(const Route&) const = default;
  bool has(int rank) const { return sender == rank || receiver == rank; }
};

/// Checks the ends and returns their channels.
std::vector<Route> routes_of(const Communicator& group, std::span<const ChannelEnd> ends) {
  std::vector<Route> out;
  for (const auto& [peer, direction, lane] : ends) {
    NRL_CHECK(peer >= 0 && peer < group.size() && peer != group.rank(), "channel on {}: no other rank {}",
              group.label(), peer);
    NRL_CHECK(lane >= 0 && lane <= max_tag, "channel on {}: lane {}", group.label(), lane);
    const Route route =
        direction == Direction::send ? Route{group.rank(), peer, lane} : Route{peer, group.rank(), lane};
    NRL_CHECK(std::find(out.begin(), out.end(), route) == out.end(), "channel on {}: rank {} twice",
              group.label(), peer);
    out.push_back(route);
  }
  return out;
}

/// The channels of all ranks in rounds, of which none has two channels of one rank: the pairs of a round do
/// not wait for each other. The same on all ranks. Collective.
std::vector<std::vector<Route>> rounds_of(Communicator& group, const std::vector<Route>& own) {
  std::string text;
  for (const Route& r : own) text += fmt::format("{} {} {}\n", r.sender, r.receiver, r.lane);
  std::map<Route, int> all;  // the number of ends that were requested
  for (const std::string& of_rank : group.gather_texts(text)) {
    std::istringstream in(of_rank);
    for (Route r{}; in >> r.sender >> r.receiver >> r.lane;) ++all[r];
  }
  std::vector<std::vector<Route>> rounds;
  for (const auto& [route, ends] : all) {
    NRL_CHECK(ends == 2, "channel {}>{} of {}: only one of the two ranks requests it", route.sender,
              route.receiver, group.label());
    const auto free =
        std::find_if(rounds.begin(), rounds.end(), [&r = route](const std::vector<Route>& round) {
          return std::none_of(round.begin(), round.end(), [&](const Route& other) {
            return other.has(r.sender) || other.has(r.receiver);
          });
        });
    (free == rounds.end() ? rounds.emplace_back() : *free).push_back(route);
  }
  return rounds;
}

}  // namespace

Channels::Channels(Communicator& group, std::span<const ChannelEnd> ends, Communicator& parent)
    : group_(group) {
  if (!parent.single_fifo()) {
    routes_of(group, ends);
    for (const ChannelEnd& end : ends) channels_.push_back(Channel(group, end, end.peer, max_tag - end.lane));
    return;
  }
  // A rank that fails to make or connect a pair must not leave its other neighbors waiting for it, so all
  // agree after every round.
  Communicator& host = parent.host();
  std::vector<Route> own;
  run_on_all(host, [&] { own = routes_of(group, ends); });
  const std::vector<std::vector<Route>> rounds = rounds_of(group.host(), own);
  auto count = static_cast<int32_t>(rounds.size());
  host.all_reduce(std::span(&count, 1), Reduce::max);
  // `use` gets this rank's channel of the round; null: none.
  const auto in_rounds = [&](const auto& use) {
    for (int32_t i = 0; i < count; ++i)
      run_on_all(host, [&] {
        const Route* mine = nullptr;
        if (i < static_cast<int32_t>(rounds.size()))
          for (const Route& r : rounds[i])
            if (r.has(group.rank())) mine = &r;
        use(mine);
      });
  };
  in_rounds([&](const Route* r) {
    if (!r) {
      (void)parent.split(-1, 0, "");
      return;
    }
    const bool sends = r->sender == group.rank();
    std::string name = fmt::format("{} {}>{}", group.name(), r->sender, r->receiver);
    if (r->lane > 0) name += fmt::format(" lane {}", r->lane);
    // The sender's rank in the world is of one pair in a round.
    pairs_.push_back(parent.split(group.members()[r->sender], sends ? 0 : 1, name));
    const ChannelEnd end = sends ? ChannelEnd{r->receiver, Direction::send, r->lane}
                                 : ChannelEnd{r->sender, Direction::receive, r->lane};
    channels_.push_back(Channel(*pairs_.back(), end, sends ? 1 : 0, 0));
  });
  size_t next = 0;
  in_rounds([&](const Route* r) {
    if (r) pairs_[next++]->connect(0, 1);
  });
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
