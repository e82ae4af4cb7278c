// On a real device: NCCL under graphs, its errors, its times.
#include "core/base/error.h"
#include "parallel/comm/world/make_device.h"
#include "tests/catch.h"
#include "tests/comm/benches.h"
#include "tests/comm/world_fixture.h"

#include <chrono>
#include <thread>

using namespace nrl;
using namespace nrl::comm;

namespace {

Bench* nccl() {
  for (const auto& bench : benches())
    if (bench->name() == "nccl") return bench.get();
  return nullptr;
}

}  // namespace

TEST_CASE("NCCL operations are recorded into a graph and replayed", "[nccl]") {
  Bench* bench = nccl();
  if (!bench) return;
  device::Runtime& runtime = *bench->runtime();
  const device::StreamHandle stream = bench->stream().native;
  const int n = test_world().size();
  Data<int32_t> data(*bench, 5000, 1);
  Data<int32_t> all(*bench, 5000 * static_cast<size_t>(n));
  bench->all_reduce(data);  // the first operation sets up what a recording cannot
  bench->all_gather(data, all);
  data.read();
  runtime.begin_capture(stream);
  Handle sum = bench->comm().all_reduce_async(data, Reduce::sum, bench->stream());
  sum.wait();
  Handle gather = bench->comm().all_gather_async(data, all, bench->stream());
  gather.wait();
  const device::Graph graph(runtime, runtime.end_capture(stream));
  for (int i = 0; i < 3; ++i) graph.launch(stream);
  bench->comm().check();
  int32_t expected = n;
  for (int i = 0; i < 3; ++i) expected *= n;
  REQUIRE(data.read() == std::vector<int32_t>(5000, expected));
  REQUIRE(all.read() == std::vector<int32_t>(5000 * static_cast<size_t>(n), expected));
  REQUIRE(bench->comm().outstanding() == 0);
}

TEST_CASE("NCCL takes no tag outside of an exchange", "[nccl]") {
  Bench* bench = nccl();
  if (!bench || test_world().size() == 1) return;
  Data<float> data(*bench, 4);
  REQUIRE_THROWS_AS(
      bench->comm().send_async(data, (test_world().rank() + 1) % test_world().size(), 3, bench->stream()),
      Error);
  REQUIRE(bench->comm().outstanding() == 0);
}

TEST_CASE("the ledger has NCCL's times on the device", "[nccl]") {
  Bench* bench = nccl();
  if (!bench || test_world().size() == 1) return;
  const auto group = bench->comm().split(0, test_world().rank(), "nccl-counted");
  test_world().ledger().reset_totals();
  {
    Data<float> data(*bench, 1 << 20, 1.0f);
    for (int i = 0; i < 3; ++i) group->all_reduce_async(data, Reduce::sum, bench->stream()).wait();
    data.read();
  }
  const auto find = [] {
    for (const LedgerTotal& t : test_world().ledger().totals())
      if (t.group == "nccl-counted" && t.op == Op::all_reduce) return t;
    return LedgerTotal{};
  };
  // The times come when the watching thread has seen them.
  for (int i = 0; i < 500 && find().exposed_seconds == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  REQUIRE(find().count == 3);
  REQUIRE(find().busy_seconds > 0);
  REQUIRE(find().exposed_seconds > 0);
}

TEST_CASE("an operation that a rank never joins is aborted and named", "[nccl]") {
  Bench* bench = nccl();
  if (!bench || test_world().size() == 1) return;
  DeviceCommOptions options;
  options.nccl_timeout_seconds = 2;
  auto group =
      make_device_communicator(DeviceCommKind::nccl, test_world().comm(), *bench->runtime(), options);
  {
    Data<float> data(*bench, 1000, 1.0f);
    group->all_reduce_async(data, Reduce::sum, bench->stream()).wait();
    data.read();
    if (test_world().rank() != 0) {
      Handle h = group->all_reduce_async(data, Reduce::sum, bench->stream());
      try {
        h.wait();
        bench->idle();  // comes back only because the group is aborted
        group->check();
        FAIL("nothing was noticed");
      } catch (const Error& e) {
        REQUIRE(e.code() == Exit::peer_lost);
        REQUIRE(std::string(e.what()).find("all_reduce #1") != std::string::npos);
        REQUIRE(std::string(e.what()).find("rank " + std::to_string(test_world().rank())) !=
                std::string::npos);
      }
    }
    test_world().comm().barrier();
  }
}
