// On a real device: NCCL under graphs, its errors, its times.
#include <chrono>
#include <thread>

#include "core/base/error.h"
#include "parallel/comm/world/make_device.h"
#include "tests/catch.h"
#include "tests/comm/backends.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using namespace nrl::comm;

namespace {

Backend* nccl() {
  for (const auto& backend : backends())
    if (backend->name() == "nccl") return backend.get();
  return nullptr;
}

}  // namespace

TEST_CASE("NCCL operations are captured into a graph and replayed", "[nccl]") {
  Backend* backend = nccl();
  if (!backend) return;
  device::Runtime& runtime = *backend->runtime();
  const device::StreamHandle stream = backend->stream().native;
  const int n = test_world().size();
  Data<int32_t> data(*backend, 5000, 1);
  Data<int32_t> all(*backend, 5000 * static_cast<size_t>(n));
  backend->all_reduce(data);  // the first operation sets up what a recording cannot
  backend->all_gather(data, all);
  data.read();
  runtime.begin_capture(stream);
  Handle sum = backend->comm().all_reduce_async(data, Reduce::sum, backend->stream());
  sum.wait();
  Handle gather = backend->comm().all_gather_async(data, all, backend->stream());
  gather.wait();
  const device::Graph graph(runtime, runtime.end_capture(stream));
  for (int i = 0; i < 3; ++i) graph.launch(stream);
  backend->comm().check();
  int32_t expected = n;
  for (int i = 0; i < 3; ++i) expected *= n;
  REQUIRE(data.read() == std::vector<int32_t>(5000, expected));
  REQUIRE(all.read() == std::vector<int32_t>(5000 * static_cast<size_t>(n), expected));
  REQUIRE(backend->comm().outstanding() == 0);
}

TEST_CASE("NCCL takes no tag outside of an exchange", "[nccl]") {
  Backend* backend = nccl();
  if (!backend || test_world().size() == 1) return;
  Data<float> data(*backend, 4);
  REQUIRE_THROWS_AS(
      backend->comm().send_async(data, (test_world().rank() + 1) % test_world().size(), 3, backend->stream()),
      Error);
  REQUIRE(backend->comm().outstanding() == 0);
}

TEST_CASE("the collective log has NCCL's times on the device", "[nccl]") {
  Backend* backend = nccl();
  if (!backend || test_world().size() == 1) return;
  const auto group = backend->comm().split(0, test_world().rank(), "nccl-counted");
  test_world().collective_log().reset_totals();
  {
    Data<float> data(*backend, 1 << 20, 1.0f);
    for (int i = 0; i < 3; ++i) group->all_reduce_async(data, Reduce::sum, backend->stream()).wait();
    data.read();
  }
  const auto find = [] {
    for (const LogTotal& t : test_world().collective_log().totals())
      if (t.group == "nccl-counted" && t.op == Op::all_reduce) return t;
    return LogTotal{};
  };
  // The watchdog logs the times after it has polled the events.
  for (int i = 0; i < 500 && find().exposed_seconds == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  REQUIRE(find().count == 3);
  REQUIRE(find().busy_seconds > 0);
  REQUIRE(find().exposed_seconds > 0);
}

TEST_CASE("an operation that a rank never joins is aborted and named", "[nccl]") {
  Backend* backend = nccl();
  if (!backend || test_world().size() == 1) return;
  DeviceCommOptions options;
  options.nccl_timeout_seconds = 2;
  auto group =
      make_device_communicator(DeviceCommKind::nccl, test_world().comm(), *backend->runtime(), options);
  {
    Data<float> data(*backend, 1000, 1.0f);
    group->all_reduce_async(data, Reduce::sum, backend->stream()).wait();
    data.read();
    if (test_world().rank() != 0) {
      Handle h = group->all_reduce_async(data, Reduce::sum, backend->stream());
      try {
        h.wait();
        backend->idle();  // comes back only because the group is aborted
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
