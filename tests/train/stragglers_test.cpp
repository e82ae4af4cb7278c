#include "apps/train/loop/stragglers.h"

#include <limits>
#include <string>
#include <vector>

#include "tests/catch.h"

using namespace nrl;
using namespace nrl::train;
using Work = Stragglers::Work;

namespace {

constexpr double unknown = std::numeric_limits<double>::quiet_NaN();

std::vector<Stragglers::Peer> peers(int ranks, int per_node, int stages = 1) {
  std::vector<Stragglers::Peer> out;
  for (int r = 0; r < ranks; ++r)
    out.push_back({r * stages / ranks, r / per_node, "host" + std::to_string(r / per_node)});
  return out;
}

std::vector<Work> work(const std::vector<double>& seconds) {
  std::vector<Work> out;
  for (const double s : seconds) out.push_back({s, 0});
  return out;
}

}  // namespace

TEST_CASE("a rank that is slow in three windows in a row is reported once in an episode") {
  Stragglers s(peers(4, 2));
  const auto slow = work({1.00, 1.01, 1.34, 0.99}), even = work({1.00, 1.01, 1.02, 0.99});
  CHECK(s.window(slow).began.empty());
  CHECK(s.window(slow).began.empty());
  CHECK(s.window(even).began.empty());  // not in a row
  CHECK(s.window(slow).began.empty());
  CHECK(s.window(slow).began.empty());
  const auto change = s.window(slow);
  REQUIRE(change.began.size() == 1);
  CHECK(change.ratio > 1.3);
  CHECK(change.began[0].rank == 2);
  CHECK(
      s.describe(change.began[0]) ==
      "rank 2 (node 1, host1) needs 1.34 x the time of its peers for its own work (computing; 1.34 s a step, "
      "median 1 s)");
  for (int i = 0; i < 5; ++i) CHECK(s.window(slow).began.empty());
  CHECK(s.window(even).ended.empty());
  CHECK(s.window(even).ended.empty());
  CHECK(s.window(even).ended == std::vector<int>{2});
  for (int i = 0; i < 2; ++i) s.window(slow);
  CHECK(s.window(slow).began.size() == 1);  // the next episode
}

TEST_CASE("both conditions must hold: far outside of the spread, and ten percent") {
  Stragglers narrow(peers(5, 5)), wide(peers(5, 5));
  for (int i = 0; i < 5; ++i) {
    CHECK(narrow.window(work({1, 1, 1, 1, 1.09})).began.empty());
    CHECK(wide.window(work({1, 1.2, 0.8, 0.9, 1.3})).began.empty());
  }
}

TEST_CASE("one of two ranks is found, and one of two nodes") {
  Stragglers two(peers(2, 2)), nodes(peers(4, 2));
  for (int i = 0; i < 2; ++i) {
    two.window(work({1.5, 1}));
    nodes.window(work({1, 1.02, 1.5, 1.52}));
  }
  const auto change = two.window(work({1.5, 1}));
  REQUIRE(change.began.size() == 1);
  CHECK(change.began[0].rank == 0);
  CHECK(two.slow_nodes().empty());
  CHECK(nodes.window(work({1, 1.02, 1.5, 1.52})).began.size() == 2);
  CHECK(nodes.slow_nodes() == std::vector<int>{1});
}

TEST_CASE("stages of a pipeline have different work; an unknown window changes nothing") {
  Stragglers s(peers(4, 4, 2));
  for (int i = 0; i < 4; ++i) CHECK(s.window(work({1, 1, 2, 2})).began.empty());
  Stragglers late(peers(3, 3));
  late.window(work({1, 1, 2}));
  late.window(work({1, 1, 2}));
  CHECK(late.window(work({1, 1, unknown})).began.empty());
  CHECK(late.window(work({1, 1, 2})).began.size() == 1);
  CHECK(late.window(work({unknown, unknown, unknown})).ratio == 1);
}

TEST_CASE("slow data is told from slow computing") {
  Stragglers s(peers(3, 3));
  const std::vector<Work> slow{{1, 0.1}, {1, 0.1}, {1.5, 0.58}};
  s.window(slow);
  s.window(slow);
  const auto change = s.window(slow);
  REQUIRE(change.began.size() == 1);
  CHECK(change.began[0].data);
}
