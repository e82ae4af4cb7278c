// Statistics of copies between the memory of the ops and that of the host, by step.
#include "memory/host_copies.h"

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/sim/sim.h"

using namespace nrl;
using namespace nrl::memory;
using device::CopyKind;

namespace {

constexpr size_t bytes = size_t{16} << 20;  // a copy takes about a millisecond

/// A simulated GPU with one buffer, and one in the host's memory.
struct Gpu {
  explicit Gpu(const device::SimOptions& options) : runtime(device::open_sim(options)) {}
  HostCopies::Ticket start(CopyKind kind) {
    const bool out = kind == CopyKind::device_to_host;
    const HostCopy copy{.to = out ? host.data() : data.data(),
                        .from = out ? data.data() : host.data(),
                        .bytes = out ? bytes : bytes / 2};
    return copies.start(std::span(&copy, 1), kind);
  }
  /// There and back. `between`: milliseconds that ops take during each copy.
  void step(int between = 0) {
    for (const CopyKind kind : {CopyKind::device_to_host, CopyKind::host_to_device}) {
      const HostCopies::Ticket ticket = start(kind);
      if (between > 0)
        device::sim_enqueue(compute.get(),
                            [between] { std::this_thread::sleep_for(std::chrono::milliseconds(between)); });
      copies.finish(ticket);
    }
    copies.end_step();
  }

  std::unique_ptr<device::Runtime> runtime;
  device::Stream compute{*runtime};
  device::Memory data{*runtime, device::Memory::Kind::device, bytes};
  device::Memory host{*runtime, device::Memory::Kind::pinned, bytes};
  Arenas arenas;
  HostCopies copies{runtime.get(), compute.get(), 1, arenas};
};

void check_bytes(const HostCopyStatistics& s) {
  CHECK(s.to_host.bytes == static_cast<int64_t>(bytes));
  CHECK(s.from_host.bytes == static_cast<int64_t>(bytes / 2));
}

}  // namespace

TEST_CASE("copies of a GPU are timed in their streams", "[memory]") {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    Gpu gpu({.seed = seed});
    // Two steps are in flight, as in training. Nothing but copies runs in the first, so ops wait for all.
    gpu.step();
    gpu.step(20);
    gpu.compute.synchronize();
    const HostCopyStatistics first = gpu.copies.collect(), second = gpu.copies.collect();
    for (const HostCopyStatistics& s : {first, second}) {
      check_bytes(s);
      CHECK(s.to_host.seconds > 0);
      CHECK(s.from_host.seconds > 0);
    }
    CHECK(second.seconds() < 0.5);  // of this step's copies alone
  }
}

TEST_CASE("exposed are copies that ops wait for", "[memory]") {
  {
    Gpu gpu({.deferred = false});  // a copy is done when it is enqueued, before the ops after it
    gpu.step(1);
    const HostCopyStatistics s = gpu.copies.collect();
    CHECK(s.seconds() > 0);
    CHECK(s.exposed_seconds == 0);
    CHECK(s.hidden() == 1);
  }
  // The copy waits for nothing, and the ops for the copy.
  double exposed = 0;
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    Gpu gpu({.seed = seed});
    gpu.step();
    gpu.compute.synchronize();
    const HostCopyStatistics s = gpu.copies.collect();
    exposed += s.exposed_seconds;
    CHECK(s.exposed_seconds < s.seconds() + 0.1);
  }
  CHECK(exposed > 0);
}

TEST_CASE("copies of a graph are counted and not timed", "[memory]") {
  Gpu gpu({});
  device::Capture capture(*gpu.runtime, gpu.compute.get());
  gpu.step();
  const device::Graph graph(*gpu.runtime, capture.end());
  for (int launch = 0; launch < 3; ++launch) {
    if (launch > 0) gpu.copies.end_step();
    graph.launch(gpu.compute.get());
    gpu.compute.synchronize();
    const HostCopyStatistics s = gpu.copies.collect();
    check_bytes(s);
    CHECK(s.seconds() == 0);
    CHECK(s.exposed_seconds == 0);
  }
  gpu.step();  // not as a graph
  gpu.compute.synchronize();
  CHECK(gpu.copies.collect().seconds() > 0);
}

TEST_CASE("copies of a CPU are timed by the clock", "[memory]") {
  MemoryPlan plan;
  const auto on_host = plan.add("state", Category::activations, static_cast<int64_t>(bytes), Tier::host);
  plan.solve();
  const Arenas arenas(plan, "/var/tmp");
  std::vector<char> data(bytes, 'x');
  HostCopies copies(nullptr, nullptr, 1, arenas);
  void* const host = arenas.at(plan, on_host);
  const HostCopy out{.to = host, .from = data.data(), .bytes = bytes},
      back{.to = data.data(), .from = host, .bytes = bytes / 2};
  copies.finish(copies.start(std::span(&out, 1), CopyKind::device_to_host));
  const auto ticket = copies.start(std::span(&back, 1), CopyKind::host_to_device);
  copies.finish(ticket);
  CHECK_THROWS_AS(copies.finish(ticket), Error);
  copies.end_step();
  const HostCopyStatistics s = copies.collect();
  check_bytes(s);
  CHECK(s.to_host.seconds > 0);
  CHECK(s.from_host.seconds > 0);
  CHECK(s.exposed_seconds == Approx(s.seconds()));  // sums in another order
  CHECK(s.hidden() == Approx(0).margin(1e-9));
  CHECK_THROWS_AS(copies.collect(), Error);
}
