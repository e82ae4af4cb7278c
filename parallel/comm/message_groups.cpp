#include "parallel/comm/message_groups.h"

#include <algorithm>

#include "core/base/error.h"

namespace nrl::comm {

int messages_per_pair(int ranks) {
  NRL_CHECK(ranks >= 1, "{} ranks", ranks);
  const int batches = nccl_message_channels * ((ranks + 7) / 8);
  // NCCL closes a kernel that has no room for a message on all channels.
  return std::max(1, (nccl_batches - nccl_message_channels) / batches);
}

std::vector<std::vector<Message>> message_groups(std::vector<Message> messages, int ranks) {
  std::stable_sort(messages.begin(), messages.end(),
                   [](const Message& a, const Message& b) { return a.tag < b.tag; });
  const auto per_pair = static_cast<size_t>(messages_per_pair(ranks));
  std::vector<size_t> sent(static_cast<size_t>(ranks)), received(sent.size());
  std::vector<std::vector<Message>> groups;
  for (const Message& m : messages) {
    if (m.data.bytes() == 0) continue;
    NRL_CHECK(m.peer >= 0 && m.peer < ranks, "a message with rank {} of {}", m.peer, ranks);
    auto& of_pair = m.kind == Message::Kind::send ? sent : received;
    const size_t group = of_pair[m.peer]++ / per_pair;
    // Groups in between are not empty: they have earlier messages of this pair.
    if (group == groups.size()) groups.emplace_back();
    groups[group].push_back(m);
  }
  return groups;
}

}  // namespace nrl::comm
