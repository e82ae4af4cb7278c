// The communicators of a plan: one order, shared where members are equal, on host and device memory.
#include "parallel/grid/groups.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>

#include "core/base/error.h"
#include "parallel/comm/recording/recording.h"
#include "tests/catch.h"
#include "tests/comm/fifo_comm.h"
#include "tests/comm/time_limit.h"
#include "tests/comm/world_fixture.h"
#include "tests/sim/sim.h"

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

// The host runs the collectives of these tests on device memory, whose large blocks the simulated device
// leaves open to it.
TEST_CASE("where a communicator runs one operation at a time, groups and channels are split from the world's",
          "[grid][device]") {
  const int n = world().size(), me = world().rank();
  if (n == 1) return;
  const auto runtime = device::open_sim({});
  for (const int stages : {n, n % 2 == 0 ? 2 : n}) {
    const TimeLimit limit("groups split from the world's");
    const parallel::ProcessGrid grid({.pp = stages}, n, me);
    const auto recorder = std::make_shared<comm::Recorder>();
    int made = 0;
    const parallel::DeviceGroups device{
        .runtime = runtime.get(), .make = [&](comm::Communicator& host) {
          ++made;
          std::vector<int> ranks(static_cast<size_t>(host.size()));
          std::iota(ranks.begin(), ranks.end(), 0);
          auto fifo = std::make_unique<FifoCommunicator>(host.subgroup(ranks, host.name()));
          return comm::make_recording(std::move(fifo), recorder, comm::RecordingMode::log);
        }};
    const int stage = grid.dense_point().pp;
    std::vector<comm::ChannelEnd> ends;
    if (stage + 1 < stages) ends.push_back({stage + 1, comm::Direction::send});
    if (stage > 0) ends.push_back({stage - 1, comm::Direction::receive});
    const parallel::GroupId chain = parallel::group::pp.on_lane(1);
    const std::array ids{parallel::group::all, parallel::group::tied, parallel::group::dp};
    const parallel::Groups groups(grid, world(), std::array{ids[0], ids[1], ids[2], chain}, device,
                                  std::array{parallel::GroupChannels{chain, ends}});
    REQUIRE(made == 1);
    REQUIRE_FALSE(groups.collective(chain));
    REQUIRE_THROWS_AS(groups[chain], Error);
    REQUIRE(groups.host(chain).members() == grid.members(chain));
    std::map<std::string, int> calls;
    for (const comm::Recorder::Entry& e : recorder->entries())  // agreements are of other types
      if (e.call.find(" f32") != std::string::npos)
        ++calls[e.group + " " + e.call.substr(0, e.call.find('('))];
    for (const parallel::GroupId& id : ids) {
      const std::vector<int> members = grid.members(id);
      REQUIRE(groups.member(id) == !members.empty());
      if (members.empty()) continue;
      REQUIRE(groups[id].members() == members);
      // Every kind of collective in three sizes.
      for (const char* op : {"all_reduce", "reduce_scatter", "all_gather"})
        REQUIRE(calls[fmt::format("{} {}", groups[id].label(), op)] == (members.size() > 1 ? 3 : 0));
      int32_t expected = 0;
      for (const int r : members) expected += r + 1;
      REQUIRE(sum_of(groups[id]) == expected);
    }
    comm::Channels& channels = groups.channels(chain);
    int32_t received = 0, expected = 0;
    if (stage > 0) channels.from(stage - 1).receive_async(comm::View(&received, 1, DType::i32)).wait();
    const int32_t sent = received + me + 1;
    if (stage + 1 < stages) channels.to(stage + 1).send_async(comm::ConstView(&sent, 1, DType::i32)).wait();
    const std::vector<int> chained = grid.members(chain);
    for (int s = 0; s <= stage; ++s) expected += chained[s] + 1;
    REQUIRE(sent == expected);
  }
}

TEST_CASE("memory is registered with groups where it lies alike, and with channels", "[grid][device]") {
  const int n = world().size(), me = world().rank();
  if (n != 4) return;
  const auto runtime = device::open_sim({});
  const parallel::ProcessGrid grid({.pp = 2}, n, me);
  std::vector<std::byte> memory(64);
  FifoCommunicator::registered().clear();
  for (const bool asked : {false, true}) {
    const parallel::DeviceGroups device{
        .runtime = runtime.get(),
        .options = {.nccl_user_buffers = asked},
        .make = [&](comm::Communicator& host) {
          std::vector<int> ranks(static_cast<size_t>(host.size()));
          std::iota(ranks.begin(), ranks.end(), 0);
          return std::make_unique<FifoCommunicator>(host.subgroup(ranks, host.name()));
        }};
    const int stage = grid.dense_point().pp;
    const std::array channels{parallel::GroupChannels{
        parallel::group::pp, {{1 - stage, stage == 0 ? comm::Direction::send : comm::Direction::receive}}}};
    const parallel::Groups groups(grid, world(),
                                  std::array{parallel::group::all, parallel::group::dp, parallel::group::pp},
                                  device, channels);
    {
      const auto registrations = groups.register_memory(memory, static_cast<uint64_t>(stage));
      const auto& found = FifoCommunicator::registered();
      if (!asked) REQUIRE(found.empty());
      // Not with the group of all ranks: the stages' memory differs.
      if (asked) REQUIRE(found == std::multiset<std::string>{groups[parallel::group::dp].label(), "pp 0>1"});
    }
    REQUIRE(FifoCommunicator::registered().empty());
  }
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
