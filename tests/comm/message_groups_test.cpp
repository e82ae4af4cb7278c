// Groups of messages: both ends must cut at the same message, and a group must be safe to launch.
#include "parallel/comm/message_groups.h"

#include <algorithm>
#include <array>

#include "core/base/philox.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::comm;

namespace {

std::byte memory[1];

/// The bytes and tags of the messages from `from` to `to` in a group of one of them.
using Seen = std::vector<std::array<int64_t, 2>>;
Seen seen(const std::vector<std::vector<Message>>& groups, size_t group, Message::Kind kind, int peer) {
  Seen out;
  if (group >= groups.size()) return out;
  for (const Message& m : groups[group])
    if (m.kind == kind && m.peer == peer) out.push_back({m.tag, m.data.bytes()});
  return out;
}

}  // namespace

TEST_CASE("messages of a pair of ranks in one group", "[comm]") {
  // (254 - 32) / (32 ceil(ranks / 8)), by hand.
  CHECK(messages_per_pair(1) == 6);
  CHECK(messages_per_pair(8) == 6);
  CHECK(messages_per_pair(9) == 3);
  CHECK(messages_per_pair(16) == 3);
  CHECK(messages_per_pair(24) == 2);
  CHECK(messages_per_pair(32) == 1);
  CHECK(messages_per_pair(1024) == 1);
  for (int ranks = 1; ranks <= 1024; ++ranks) {
    const int n = messages_per_pair(ranks), batches = n * 32 * ((ranks + 7) / 8);
    CHECK((n == 1 || batches + 32 <= 254));
  }
}

TEST_CASE("both ends of all messages cut an exchange into the same groups", "[comm]") {
  for (const int ranks : {1, 2, 5, 8, 12, 20, 33}) {
    const PhiloxStream stream(7, "message groups");
    uint64_t draw = 0;
    const auto below = [&](int64_t n) {
      return static_cast<int64_t>(std::abs(stream.normal(draw++)) * 1e6) % n;
    };
    // Tags out of order, repeated and missing; some messages are empty.
    std::vector<std::vector<Message>> of_rank(static_cast<size_t>(ranks));
    size_t most = 0;
    for (int from = 0; from < ranks; ++from)
      for (int to = 0; to < ranks; ++to) {
        const int64_t count = below(20);
        size_t full = 0;
        for (int64_t i = 0; i < count; ++i) {
          const View data(memory, below(4) == 0 ? 0 : 1 + below(1000), DType::u8);
          const int tag = static_cast<int>(below(9));
          of_rank[from].push_back(Message::send(data, to, tag));
          of_rank[to].push_back(Message::recv(data, from, tag));
          full += data.bytes() > 0;
        }
        most = std::max(most, full);
      }
    std::vector<std::vector<std::vector<Message>>> groups;
    for (const auto& own : of_rank) groups.push_back(message_groups(own, ranks));

    const auto per_pair = static_cast<size_t>(messages_per_pair(ranks));
    for (int from = 0; from < ranks; ++from)
      for (int to = 0; to < ranks; ++to) {
        CAPTURE(ranks, from, to);
        Seen all;
        for (size_t g = 0; g < (most + per_pair - 1) / per_pair; ++g) {
          const Seen sends = seen(groups[from], g, Message::Kind::send, to);
          REQUIRE(sends == seen(groups[to], g, Message::Kind::recv, from));
          CHECK(sends.size() <= per_pair);
          all.insert(all.end(), sends.begin(), sends.end());
        }
        // Each message once, by tag, those of a tag in their order.
        Seen expected;
        for (const Message& m : of_rank[from])
          if (m.kind == Message::Kind::send && m.peer == to && m.data.bytes() > 0)
            expected.push_back({m.tag, m.data.bytes()});
        std::stable_sort(expected.begin(), expected.end(),
                         [](const auto& a, const auto& b) { return a[0] < b[0]; });
        CHECK(all == expected);
      }
  }
}
