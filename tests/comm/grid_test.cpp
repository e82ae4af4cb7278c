#include "parallel/grid/grid.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;

namespace {

parallel::AxisSet axes_of(unsigned bits) {
  parallel::AxisSet set;
  for (unsigned i = 0; i < 5; ++i)
    if (bits & (1u << i)) set = set | static_cast<parallel::Axis>(1u << i);
  return set;
}

}  // namespace

TEST_CASE("groups of any axes partition the ranks", "[grid]") {
  const parallel::GridPoint shapes[] = {
      {}, {2, 1, 1, 1, 1}, {2, 3, 1, 4, 2}, {1, 2, 3, 2, 2}, {4, 1, 2, 3, 3}, {2, 2, 2, 2, 2}};
  for (const parallel::GridPoint& shape : shapes) {
    const parallel::RankGrid grid(shape);
    for (int r = 0; r < grid.ranks(); ++r) REQUIRE(grid.rank_at(grid.coordinates(r)) == r);
    for (unsigned bits = 0; bits < 32; ++bits) {
      const parallel::AxisSet axes = axes_of(bits);
      const auto groups = grid.groups(axes);
      std::set<int> seen;
      for (const auto& group : groups) {
        REQUIRE(static_cast<int>(group.size()) == grid.group_size(axes));
        for (int r : group) {
          REQUIRE(seen.insert(r).second);
          REQUIRE(grid.group_of(r, axes) == group);
        }
        // A group meets each group of the other axes in exactly one rank.
        const auto across = grid.group_of(group.back(), parallel::AxisSet::all().without(axes));
        int common = 0;
        for (int r : across) common += std::count(group.begin(), group.end(), r) ? 1 : 0;
        REQUIRE(common == 1);
      }
      REQUIRE(static_cast<int>(seen.size()) == grid.ranks());
    }
  }
}

TEST_CASE("rank order is tp-cp-ep-dp-pp", "[grid]") {
  const parallel::RankGrid grid({2, 2, 1, 2, 2});  // 16 ranks
  REQUIRE(grid.group_of(0, parallel::Axis::tp) == std::vector<int>{0, 1});
  REQUIRE(grid.group_of(0, parallel::Axis::cp) == std::vector<int>{0, 2});
  REQUIRE(grid.group_of(5, parallel::Axis::dp) == std::vector<int>{1, 5});
  REQUIRE(grid.group_of(3, parallel::Axis::pp) == std::vector<int>{3, 11});
  REQUIRE(grid.group_of(7, parallel::Axis::dp | parallel::Axis::cp) == std::vector<int>{1, 3, 5, 7});
  REQUIRE(grid.group_of(9, parallel::Axis::tp | parallel::Axis::pp) == std::vector<int>{0, 1, 8, 9});
  const parallel::RankGrid experts({1, 1, 4, 2, 2});
  REQUIRE(experts.group_of(6, parallel::Axis::ep) == std::vector<int>{4, 5, 6, 7});
  REQUIRE(experts.group_of(6, parallel::Axis::dp) == std::vector<int>{2, 6});
}

TEST_CASE("a process grid lists every group's members without communication", "[grid]") {
  // 8 ranks: tp 2, dp 2, pp 2; experts: etp 1, ep 2, edp 2, pp 2. Rank 5 is tp 1, dp 0, pp 1.
  const parallel::ProcessGrid grid({.tp = 2, .pp = 2, .ep = 2, .etp = 1}, 8, 5);
  REQUIRE(grid.dense_point() == parallel::GridPoint{1, 0, 0, 0, 1});
  REQUIRE(grid.members(parallel::group::tp) == std::vector<int>{4, 5});
  REQUIRE(grid.members(parallel::group::dp_cp) == std::vector<int>{5, 7});
  REQUIRE(grid.members(parallel::group::edp) == std::vector<int>{5, 7});
  REQUIRE(grid.members(parallel::group::ep) == std::vector<int>{4, 5});
  REQUIRE(grid.members(parallel::group::tp_pp) == std::vector<int>{0, 1, 4, 5});
  REQUIRE(grid.members(parallel::group::tied) == std::vector<int>{1, 3, 5, 7});
  for (const parallel::GroupId& id :
       {parallel::group::tp, parallel::group::dp_cp, parallel::group::edp, parallel::group::tied})
    REQUIRE(grid.group_size(id) == static_cast<int>(grid.members(id).size()));
  REQUIRE(grid.describe().find("tp 2") != std::string::npos);
  // Only the outer stages hold embeddings.
  for (int stage = 0; stage < 4; ++stage) {
    const parallel::ProcessGrid deep({.pp = 4}, 4, stage);
    const bool outer = stage == 0 || stage == 3;
    REQUIRE(deep.members(parallel::group::tied) == (outer ? std::vector<int>{0, 3} : std::vector<int>{}));
  }
  REQUIRE(parallel::name_of(parallel::group::etp_ep) == "etp-ep");
  REQUIRE(parallel::name_of(parallel::group::tied) == "cp-dp-pp ends");
  REQUIRE(parallel::name_of({.axes = parallel::Axis::dp, .lane = 1}) == "dp lane 1");
}

TEST_CASE("slices of a group and the groups across them cover it once", "[grid]") {
  using parallel::group::dp_cp;
  for (const int slice : {1, 2, 3, 6}) {
    std::map<std::vector<int>, int> inside, across;
    for (int rank = 0; rank < 24; ++rank) {  // tp 2 x cp 2 x dp 3 x pp 2: six ranks per group
      const parallel::ProcessGrid grid({.tp = 2, .cp = 2, .pp = 2}, 24, rank);
      const std::vector<int> whole = grid.members(dp_cp), in = grid.members(dp_cp.inside(slice)),
                             over = grid.members(dp_cp.across_slices(slice));
      REQUIRE(static_cast<int>(in.size()) == slice);
      REQUIRE(static_cast<int>(over.size()) == 6 / slice);
      const auto at = std::find(whole.begin(), whole.end(), rank) - whole.begin();
      // Consecutive members, and the same index in every slice; both contain this rank only once in common.
      REQUIRE(std::equal(in.begin(), in.end(), whole.begin() + at / slice * slice));
      for (size_t i = 0; i < over.size(); ++i)
        REQUIRE(over[i] == whole[static_cast<size_t>(at % slice) + i * static_cast<size_t>(slice)]);
      ++inside[in];
      ++across[over];
    }
    for (const auto& [members, count] : inside) REQUIRE(count == static_cast<int>(members.size()));
    for (const auto& [members, count] : across) REQUIRE(count == static_cast<int>(members.size()));
  }
  const parallel::ProcessGrid grid({}, 4, 1);
  REQUIRE(grid.members(dp_cp.inside(0)) == grid.members(dp_cp));
  REQUIRE_THROWS_AS(grid.members(dp_cp.inside(3)), Error);
  REQUIRE(parallel::name_of(dp_cp.inside(2)) == "cp-dp slices of 2");
  REQUIRE(parallel::name_of(dp_cp.across_slices(2).on_lane(1)) == "cp-dp across slices of 2 lane 1");
}

TEST_CASE("sizes that do not fit are a configuration error", "[grid]") {
  try {
    parallel::ProcessGrid grid({.tp = 4}, 6, 0);
    FAIL();
  } catch (const Error& e) {
    REQUIRE(e.code() == Exit::config);
    REQUIRE(std::string(e.what()).find("tp x cp x pp") != std::string::npos);
  }
  REQUIRE_THROWS_AS(parallel::RankGrid({0, 1, 1, 1, 1}), Error);
  REQUIRE_THROWS_AS(parallel::RankGrid({1 << 20, 1 << 20, 1, 1, 1}), Error);
}

TEST_CASE("Ids have equal digits where they have equal groups", "[grid]") {
  uint64_t state = 3;
  const auto choose = [&](std::initializer_list<int> from) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return from.begin()[(state >> 33) % from.size()];
  };
  int equal = 0, compared = 0;
  for (int round = 0; round < 300; ++round) {
    parallel::GridSizes sizes{.tp = choose({1, 2, 3}), .cp = choose({1, 2}), .pp = choose({1, 2, 3, 4})};
    sizes.ep = choose({1, 2, 4});
    sizes.etp = choose({0, 1});
    const int dense = sizes.tp * sizes.cp * sizes.pp,
              experts = (sizes.etp == 0 ? sizes.tp : sizes.etp) * sizes.ep * sizes.pp;
    const int ranks = std::lcm(dense, experts) * choose({1, 2, 4});
    const parallel::ProcessGrid grid(sizes, ranks, choose({0, 1}) % ranks);
    std::vector<parallel::GroupId> ids;
    for (int i = 0; i < 8; ++i) {
      parallel::GroupId id{.axes = {}, .expert = choose({0, 1}) == 1, .ends = choose({0, 0, 1}) == 1};
      for (const parallel::Axis axis : {parallel::Axis::tp, parallel::Axis::cp, parallel::Axis::ep,
                                        parallel::Axis::dp, parallel::Axis::pp})
        if (choose({0, 1}) == 1) id.axes = id.axes | axis;
      if (const int slice = choose({0, 0, 2, 4}); slice > 0 && grid.group_size(id) % slice == 0)
        id = choose({0, 1}) == 0 ? id.inside(slice) : id.across_slices(slice);
      ids.push_back(id);
    }
    for (const parallel::GroupId& a : ids)
      for (const parallel::GroupId& b : ids) {
        const auto of_a = grid.digits(a), of_b = grid.digits(b);
        if (!of_a || !of_b || a.ends != b.ends) continue;
        CAPTURE(grid.describe(), name_of(a), name_of(b));
        const auto sorted = [&](const parallel::GroupId& id) {
          std::vector<std::vector<int>> groups = grid.groups(id);
          std::sort(groups.begin(), groups.end());
          return groups;
        };
        const bool same = sorted(a) == sorted(b);
        CHECK((of_a == of_b) == same);
        ++compared;
        equal += same ? 1 : 0;
      }
  }
  CHECK(compared > 8'000);
  CHECK(equal > 3'000);
}
