// The communicators of a plan: one order, shared where members are equal, on host and device memory.
#include "parallel/grid/groups.h"

#include <algorithm>
#include <array>

#include "core/base/error.h"
#include "core/device/sim/sim.h"
#include "tests/catch.h"
#include "tests/comm/time_limit.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;

namespace {

comm::Communicator& world() {
  return test_world().comm();
}

parallel::GridSizes sizes() {
  parallel::GridSizes out;
  if (world().size() % 2 == 0) out.pp = 2;
  return out;
}

int32_t sum_of(comm::Communicator& group) {
  std::vector<int32_t> value = {world().rank() + 1};
  group.all_reduce(value);
  return value[0];
}

}  // namespace

TEST_CASE("groups are created in one order, independent of the order requested", "[grid]") {
  const parallel::ProcessGrid grid(sizes(), world().size(), world().rank());
  std::vector<parallel::GroupId> ids = {parallel::group::tp,    parallel::group::pp,   parallel::group::dp_cp,
                                        parallel::group::tp_pp, parallel::group::tied, parallel::group::edp};
  if (world().rank() % 2 == 1) std::reverse(ids.begin(), ids.end());
  const TimeLimit limit("groups requested in several orders");
  const parallel::Groups groups(grid, world(), ids);
  for (const parallel::GroupId& id : ids) {
    int32_t expected = 0;
    for (int r : grid.members(id)) expected += r + 1;
    REQUIRE(sum_of(groups[id]) == expected);
    REQUIRE(groups[id].members() == grid.members(id));
  }
  REQUIRE_THROWS_AS(groups[parallel::group::cp], Error);
}

TEST_CASE("groups of equal members share one communicator unless their lanes differ", "[grid]") {
  const parallel::ProcessGrid grid(sizes(), world().size(), world().rank());
  const parallel::GroupId second{.axes = parallel::Axis::dp, .lane = 1};
  const parallel::Groups groups(grid, world(),
                                std::array{parallel::group::dp_cp, parallel::group::dp, parallel::group::edp,
                                           parallel::group::tp_dp_cp, second});
  REQUIRE(&groups[parallel::group::dp] == &groups[parallel::group::dp_cp]);
  REQUIRE(&groups[parallel::group::dp] == &groups[parallel::group::edp]);
  REQUIRE(&groups[parallel::group::dp] == &groups[parallel::group::tp_dp_cp]);
  REQUIRE(&groups[parallel::group::dp] != &groups[second]);
  REQUIRE(groups[second].members() == groups[parallel::group::dp].members());
  REQUIRE(groups.labels().size() == 2);
}

TEST_CASE("a sum over slices and then across them is the sum over the group", "[grid]") {
  using parallel::group::dp_cp;
  if (world().size() % 2 != 0) return;
  const parallel::ProcessGrid grid({}, world().size(), world().rank());
  const parallel::Groups groups(grid, world(), std::array{dp_cp.inside(2), dp_cp, dp_cp.across_slices(2)});
  std::vector<int32_t> value = {world().rank() + 1};
  groups[dp_cp.inside(2)].all_reduce(value);
  groups[dp_cp.across_slices(2)].all_reduce(value);
  REQUIRE(value[0] == sum_of(groups[dp_cp]));
  // Of two ranks, a slice is the whole group, whose communicator it shares.
  REQUIRE((&groups[dp_cp] == &groups[dp_cp.inside(2)]) == (world().size() == 2));
}

TEST_CASE("a rank between the ends has no group of tied embeddings", "[grid]") {
  const parallel::ProcessGrid grid({.pp = world().size()}, world().size(), world().rank());
  const parallel::Groups groups(grid, world(), std::array{parallel::group::tied, parallel::group::pp});
  const bool outer = world().rank() == 0 || world().rank() == world().size() - 1;
  REQUIRE(groups.member(parallel::group::tied) == outer);
  if (!outer) REQUIRE_THROWS_AS(groups[parallel::group::tied], Error);
  if (outer) REQUIRE(groups[parallel::group::tied].size() == std::min(world().size(), 2));
}

TEST_CASE("with a device every group is there for host and for device memory", "[grid][device]") {
  const parallel::ProcessGrid grid(sizes(), world().size(), world().rank());
  const auto runtime = device::open_sim({});
  const parallel::Groups groups(
      grid, world(), std::array{parallel::group::dp_cp, parallel::group::pp, parallel::group::dp},
      parallel::DeviceGroups{comm::DeviceCommKind::staged, runtime.get(), {.staged_slot_bytes = 1 << 14}});
  REQUIRE(&groups[parallel::group::dp].host() == &groups.host(parallel::group::dp));
  REQUIRE(&groups[parallel::group::dp] != &groups.host(parallel::group::dp));
  REQUIRE(&groups[parallel::group::dp] == &groups[parallel::group::dp_cp]);
  const device::Stream stream(*runtime);
  for (const parallel::GroupId& id : {parallel::group::dp, parallel::group::pp}) {
    const device::Memory data(*runtime, device::Memory::Kind::device, 4);
    const device::Memory pinned(*runtime, device::Memory::Kind::pinned, 4);
    runtime->fill(data.data(), 1, 4, stream.get());
    groups[id]
        .all_reduce_async({data.data(), 1, DType::i32}, comm::Reduce::sum, comm::StreamRef{stream.get()})
        .wait();
    runtime->copy(pinned.data(), data.data(), 4, device::CopyKind::device_to_host, stream.get());
    stream.synchronize();
    REQUIRE(*reinterpret_cast<const int32_t*>(pinned.data()) == 0x01010101 * groups[id].size());
  }
  groups.check();
}

TEST_CASE("a set of groups that differs among the ranks is an error on all of them", "[grid]") {
  if (world().size() == 1) return;
  const parallel::ProcessGrid grid({}, world().size(), world().rank());
  std::vector<parallel::GroupId> ids = {parallel::group::dp};
  if (world().rank() == 1) ids.push_back(parallel::group::tp);
  try {
    const parallel::Groups groups(grid, world(), ids);
    FAIL();
  } catch (const Error& e) {
    REQUIRE(e.code() == Exit::internal);
    REQUIRE(std::string(e.what()).find("rank 0: dp; rank 1: tp, dp") != std::string::npos);
  }
}

TEST_CASE("a device group that fails on one rank fails on all", "[grid][device]") {
  if (world().size() == 1) return;
  const parallel::ProcessGrid grid({}, world().size(), world().rank());
  const auto runtime = device::open_sim({});
  const comm::DeviceCommOptions options{.staged_slot_bytes = 65536 + 64 * (world().rank() == 1)};
  try {
    const parallel::Groups groups(
        grid, world(), std::array{parallel::group::dp, parallel::group::tp},
        parallel::DeviceGroups{comm::DeviceCommKind::staged, runtime.get(), options});
    FAIL();
  } catch (const Error& e) {
    REQUIRE(e.code() == Exit::internal);
  }
}
