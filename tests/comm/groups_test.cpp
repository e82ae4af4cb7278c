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

GridSizes sizes() {
  GridSizes out;
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
  const ProcessGrid grid(sizes(), world().size(), world().rank());
  std::vector<GroupId> ids = {group::tp, group::pp, group::dp_cp, group::tp_pp, group::embedding, group::edp};
  if (world().rank() % 2 == 1) std::reverse(ids.begin(), ids.end());
  const TimeLimit limit("groups requested in several orders");
  const Groups groups(grid, world(), ids);
  for (const GroupId& id : ids) {
    int32_t expected = 0;
    for (int r : grid.members(id)) expected += r + 1;
    REQUIRE(sum_of(groups[id]) == expected);
    REQUIRE(groups[id].members() == grid.members(id));
  }
  REQUIRE_THROWS_AS(groups[group::cp], Error);
}

TEST_CASE("groups of equal members share one communicator unless their lanes differ", "[grid]") {
  const ProcessGrid grid(sizes(), world().size(), world().rank());
  const GroupId second{.axes = Axis::dp, .lane = 1};
  const Groups groups(grid, world(),
                      std::array{group::dp_cp, group::dp, group::edp, group::tp_dp_cp, second});
  REQUIRE(&groups[group::dp] == &groups[group::dp_cp]);
  REQUIRE(&groups[group::dp] == &groups[group::edp]);
  REQUIRE(&groups[group::dp] == &groups[group::tp_dp_cp]);
  REQUIRE(&groups[group::dp] != &groups[second]);
  REQUIRE(groups[second].members() == groups[group::dp].members());
  REQUIRE(groups.labels().size() == 2);
}

TEST_CASE("a rank between the ends has no embedding group", "[grid]") {
  const ProcessGrid grid({.pp = world().size()}, world().size(), world().rank());
  const Groups groups(grid, world(), std::array{group::embedding, group::pp});
  const bool outer = world().rank() == 0 || world().rank() == world().size() - 1;
  REQUIRE(groups.member(group::embedding) == outer);
  if (!outer) REQUIRE_THROWS_AS(groups[group::embedding], Error);
  if (outer) REQUIRE(groups[group::embedding].size() == std::min(world().size(), 2));
}

TEST_CASE("with a device every group is there for host and for device memory", "[grid][device]") {
  const ProcessGrid grid(sizes(), world().size(), world().rank());
  const auto runtime = device::open_sim({});
  const Groups groups(
      grid, world(), std::array{group::dp_cp, group::pp, group::dp},
      DeviceGroups{comm::DeviceCommKind::staged, runtime.get(), {.staged_slot_bytes = 1 << 14}});
  REQUIRE(&groups[group::dp].host() == &groups.host(group::dp));
  REQUIRE(&groups[group::dp] != &groups.host(group::dp));
  REQUIRE(&groups[group::dp] == &groups[group::dp_cp]);
  const device::Stream stream(*runtime);
  for (const GroupId& id : {group::dp, group::pp}) {
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
  const ProcessGrid grid({}, world().size(), world().rank());
  std::vector<GroupId> ids = {group::dp};
  if (world().rank() == 1) ids.push_back(group::tp);
  try {
    const Groups groups(grid, world(), ids);
    FAIL();
  } catch (const Error& e) {
    REQUIRE(e.code() == Exit::internal);
    REQUIRE(std::string(e.what()).find("rank 0: dp; rank 1: tp, dp") != std::string::npos);
  }
}

TEST_CASE("a device group that fails on one rank fails on all", "[grid][device]") {
  if (world().size() == 1) return;
  const ProcessGrid grid({}, world().size(), world().rank());
  const auto runtime = device::open_sim({});
  const comm::DeviceCommOptions options{.staged_slot_bytes = 65536 + 64 * (world().rank() == 1)};
  try {
    const Groups groups(grid, world(), std::array{group::dp, group::tp},
                        DeviceGroups{comm::DeviceCommKind::staged, runtime.get(), options});
    FAIL();
  } catch (const Error& e) {
    REQUIRE(e.code() == Exit::internal);
  }
}
