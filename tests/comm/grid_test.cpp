#include "parallel/grid/grid.h"
#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/comm/world_fixture.h"

#include <set>

using namespace nrl;

namespace {

AxisSet axes_of(unsigned bits) {
  AxisSet set;
  for (unsigned i = 0; i < 5; ++i)
    if (bits & (1u << i)) set = set | static_cast<Axis>(1u << i);
  return set;
}

}  // namespace

TEST_CASE("groups of any axes partition the ranks", "[grid]") {
  const GridPoint shapes[] = {
      {}, {2, 1, 1, 1, 1}, {2, 3, 1, 4, 2}, {1, 2, 3, 2, 2}, {4, 1, 2, 3, 3}, {2, 2, 2, 2, 2}};
  for (const GridPoint& shape : shapes) {
    const RankGrid grid(shape);
    for (int r = 0; r < grid.ranks(); ++r) REQUIRE(grid.rank_at(grid.coordinates(r)) == r);
    for (unsigned bits = 0; bits < 32; ++bits) {
      const AxisSet axes = axes_of(bits);
      const auto groups = grid.groups(axes);
      std::set<int> seen;
      for (const auto& group : groups) {
        REQUIRE(static_cast<int>(group.size()) == grid.group_size(axes));
        for (int r : group) {
          REQUIRE(seen.insert(r).second);
          REQUIRE(grid.group_of(r, axes) == group);
        }
        // A group meets each group of the other axes in exactly one rank.
        const auto across = grid.group_of(group.back(), AxisSet::all().without(axes));
        int common = 0;
        for (int r : across) common += std::count(group.begin(), group.end(), r) ? 1 : 0;
        REQUIRE(common == 1);
      }
      REQUIRE(static_cast<int>(seen.size()) == grid.ranks());
    }
  }
}

TEST_CASE("rank order is tp-cp-ep-dp-pp", "[grid]") {
  const RankGrid grid({2, 2, 1, 2, 2});  // 16 ranks
  REQUIRE(grid.group_of(0, Axis::tp) == std::vector<int>{0, 1});
  REQUIRE(grid.group_of(0, Axis::cp) == std::vector<int>{0, 2});
  REQUIRE(grid.group_of(5, Axis::dp) == std::vector<int>{1, 5});
  REQUIRE(grid.group_of(3, Axis::pp) == std::vector<int>{3, 11});
  REQUIRE(grid.group_of(7, Axis::dp | Axis::cp) == std::vector<int>{1, 3, 5, 7});
  REQUIRE(grid.group_of(9, Axis::tp | Axis::pp) == std::vector<int>{0, 1, 8, 9});
  const RankGrid experts({1, 1, 4, 2, 2});
  REQUIRE(experts.group_of(6, Axis::ep) == std::vector<int>{4, 5, 6, 7});
  REQUIRE(experts.group_of(6, Axis::dp) == std::vector<int>{2, 6});
}

TEST_CASE("the process grid makes only the groups asked for", "[grid]") {
  auto& world = test_world().comm();
  const int n = world.size();
  GridSizes sizes;
  if (n % 2 == 0) sizes.tp = sizes.ep = 2, sizes.etp = 1;
  ProcessGrid grid(sizes, world);
  REQUIRE(grid.made().empty());
  REQUIRE(grid.dense().sizes().dp * sizes.tp == n);
  std::vector<int32_t> ranks = {world.rank()};
  grid.dp().all_reduce(ranks);
  int expected = 0;
  for (int r : grid.dense().group_of(world.rank(), Axis::dp)) expected += r;
  REQUIRE(ranks[0] == expected);
  REQUIRE(&grid.dp() == &grid.dp());
  REQUIRE(grid.made().size() == 1);
  REQUIRE(grid.tp().size() == sizes.tp);
  REQUIRE(grid.ep().size() == sizes.ep);
  REQUIRE(grid.embedding().size() == 1);
  REQUIRE(grid.made().size() == 4);
  REQUIRE(grid.describe().find("tp " + std::to_string(sizes.tp)) != std::string::npos);
}

TEST_CASE("sizes that do not fit are a configuration error", "[grid]") {
  GridSizes sizes;
  sizes.tp = test_world().size() + 1;
  try {
    ProcessGrid grid(sizes, test_world().comm());
    FAIL();
  } catch (const Error& e) {
    REQUIRE(e.code() == Exit::config);
    REQUIRE(std::string(e.what()).find("tp x cp x pp") != std::string::npos);
  }
  REQUIRE_THROWS_AS(RankGrid({0, 1, 1, 1, 1}), Error);
  REQUIRE_THROWS_AS(RankGrid({1 << 20, 1 << 20, 1, 1, 1}), Error);
}
