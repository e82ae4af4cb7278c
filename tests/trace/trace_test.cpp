// Ranges on the host and on the (simulated) device.

#include "core/trace/trace.h"

#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/trace/device_timeline.h"
#include "tests/catch.h"
#include "tests/sim/sim.h"

namespace {

using namespace nrl;
using device::Graph;
using device::Stream;

void work_ms(const Stream& stream, int ms) {
  device::sim_enqueue(stream.get(), [ms] { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); });
}

/// The total of a name; zero when there is none.
trace::Total find(const std::vector<trace::Total>& totals, const std::string& name) {
  for (const trace::Total& t : totals)
    if (t.name == name) return t;
  return {};
}

/// Attaches for its life.
struct Attached {
  Attached(device::Runtime& runtime, const Stream& stream, trace::Mode mode) {
    trace::start(mode);
    trace::attach_device(runtime, stream.get());
  }
  ~Attached() {
    trace::detach_device();
    trace::start(trace::Mode::off);
  }
};

TEST_CASE("ranges count on the host, also when nested", "[trace]") {
  trace::start(trace::Mode::totals);
  for (int i = 0; i < 3; ++i) {
    const trace::Range outer("outer");
    const trace::Range inner(trace::intern("epoch_" + std::to_string(7)));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  const auto totals = trace::totals();
  trace::start(trace::Mode::off);
  REQUIRE(totals.size() == 2);
  REQUIRE(find(totals, "outer").count == 3);
  REQUIRE(find(totals, "outer").seconds >= 0.006);
  REQUIRE(find(totals, "epoch_7").seconds >= 0.006);
  REQUIRE(trace::intern("epoch_7") == trace::intern("epoch_7"));
  { const trace::Range off("off"); }
  REQUIRE(trace::totals().empty());
}

TEST_CASE("NVTX ranges may be on without a tool", "[trace]") {
  trace::emit_nvtx(true);
  trace::start(trace::Mode::off);
  {
    const trace::Range outer("outer");
    const trace::Range inner("inner");
    trace::emit_nvtx(false);  // what was pushed is popped
  }
  REQUIRE(trace::totals().empty());
}

TEST_CASE("a range of an attached device measures its work, not the call", "[trace]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime);
  const Attached attached(*runtime, stream, trace::Mode::totals);
  for (int i = 0; i < 2; ++i) {
    const trace::Range step("step");
    {
      const trace::Range a("a");
      work_ms(stream, 8);
    }
    const trace::Range b("b");
    work_ms(stream, 2);
  }
  REQUIRE(trace::device_totals().empty());  // nothing is known yet, and nobody waited
  REQUIRE(find(trace::totals(), "step").seconds < 0.008);
  stream.synchronize();
  REQUIRE(trace::collect_device() == 0);
  const auto totals = trace::device_totals();
  REQUIRE(totals.size() == 3);
  REQUIRE(find(totals, "a").count == 2);
  REQUIRE(find(totals, "a").seconds >= 0.016);
  REQUIRE(find(totals, "b").seconds >= 0.004);
  REQUIRE(find(totals, "b").seconds < find(totals, "a").seconds);
  REQUIRE(find(totals, "step").seconds >= 0.020);
  trace::start(trace::Mode::totals);
  REQUIRE(trace::device_totals().empty());
}

TEST_CASE("collecting reads completed ranges and keeps the others", "[trace]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime), other(*runtime);
  const Attached attached(*runtime, stream, trace::Mode::totals);
  const trace::Range open("open");
  {
    const trace::Range a("a");
    work_ms(stream, 0);
  }
  stream.synchronize();
  {
    const trace::DeviceRange later("later", other.get());
    work_ms(other, 0);
  }
  REQUIRE(trace::collect_device() >= 1);
  REQUIRE(find(trace::device_totals(), "a").count == 1);
  REQUIRE(find(trace::device_totals(), "open").count == 0);
  other.synchronize();
  REQUIRE(trace::collect_device() == 1);  // the open one
  REQUIRE(find(trace::device_totals(), "later").count == 1);
}

TEST_CASE("totals of a device tell the range around", "[trace]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime), other(*runtime);
  const Attached attached(*runtime, stream, trace::Mode::totals);
  for (int i = 0; i < 2; ++i) {
    const trace::Range outer("outer");
    { const trace::Range a("a"); }
    const trace::Range inner("inner");
    { const trace::Range a("a"); }
    { const trace::Range a("a"); }
    const trace::DeviceRange copy("copy", other.get());
  }
  { const trace::Range a("a"); }
  runtime->synchronize();
  REQUIRE(trace::collect_device() == 0);
  const auto count = [](const std::string& name, const std::string& parent) {
    int64_t calls = 0;
    for (const trace::Total& t : trace::device_totals_by_parent())
      if (t.name == name && t.parent == parent) calls += t.count;
    return calls;
  };
  CHECK(count("a", "outer") == 2);
  CHECK(count("a", "inner") == 4);
  CHECK(count("a", "") == 1);
  CHECK(count("inner", "outer") == 2);
  CHECK(count("copy", "") == 2);
  CHECK(trace::device_totals_by_parent().size() == 6);
  CHECK(find(trace::device_totals(), "a").count == 7);
  CHECK(find(trace::device_totals(), "a").parent.empty());
}

TEST_CASE("the innermost range is known while ranges are recorded or nesting is tracked", "[trace]") {
  using namespace std::string_view_literals;
  const auto inside = [] {
    const trace::Range outer("outer");
    const trace::Range inner("inner");
    return trace::innermost();
  };
  CHECK(inside() == ""sv);
  trace::track_nesting(true);
  CHECK(inside() == "inner"sv);
  CHECK(trace::innermost() == ""sv);
  {
    const trace::Range open("open");
    trace::track_nesting(false);
    CHECK(inside() == "open"sv);  // opened without tracking: not known
  }
  CHECK(trace::innermost() == ""sv);
  CHECK(trace::totals().empty());  // nothing was recorded
  trace::start(trace::Mode::totals);
  CHECK(inside() == "inner"sv);
  trace::start(trace::Mode::off);
  CHECK(inside() == ""sv);
}

TEST_CASE("only the thread that attached times its ranges", "[trace]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime);
  const Attached attached(*runtime, stream, trace::Mode::totals);
  std::thread([] { const trace::Range elsewhere("elsewhere"); }).join();
  stream.synchronize();
  REQUIRE(trace::collect_device() == 0);
  REQUIRE(trace::device_totals().empty());
  REQUIRE(find(trace::totals(), "elsewhere").count == 1);
}

TEST_CASE("nothing is captured into a graph", "[trace]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime);
  const Attached attached(*runtime, stream, trace::Mode::totals);
  Graph graph;
  {
    const trace::Range around("around the capture");
    runtime->begin_capture(stream.get());
    {
      const trace::Range inside("inside");
      work_ms(stream, 3);
    }
    const trace::Range half("half inside");
    graph = Graph(*runtime, runtime->end_capture(stream.get()));
  }
  {
    const trace::Range launch("launch");
    graph.launch(stream.get());
  }
  stream.synchronize();
  REQUIRE(trace::collect_device() == 0);
  const auto totals = trace::device_totals();
  REQUIRE(find(totals, "inside").count == 0);
  REQUIRE(find(totals, "half inside").count == 0);
  REQUIRE(find(totals, "around the capture").count == 1);
  REQUIRE(find(totals, "launch").seconds >= 0.003);
}

TEST_CASE("a range that ends inside a capture is dropped", "[trace]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime);
  const Attached attached(*runtime, stream, trace::Mode::totals);
  {
    const trace::Range cut("cut");
    runtime->begin_capture(stream.get());
  }
  const Graph graph(*runtime, runtime->end_capture(stream.get()));
  stream.synchronize();
  REQUIRE(trace::collect_device() == 0);
  REQUIRE(trace::device_totals().empty());
}

TEST_CASE("an error of the device does not leave a range's destructor", "[trace]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime);
  const Attached attached(*runtime, stream, trace::Mode::totals);
  {
    const trace::Range range("range");
    device::sim_enqueue(stream.get(), [] { fail(Exit::internal, "broken"); });
    REQUIRE_THROWS_WITH(stream.synchronize(), "broken");
  }
  SUCCEED("the program lives");
}

TEST_CASE("the timeline has rows of the device on the host's clock", "[trace]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime), copies(*runtime);
  const Attached attached(*runtime, stream, trace::Mode::timeline);
  {
    const trace::Range a("first");
    work_ms(stream, 4);
    const trace::DeviceRange c("copy", copies.get());
    work_ms(copies, 1);
  }
  runtime->synchronize();
  trace::collect_device();
  const trace::Window window = trace::take();
  REQUIRE(window.events.size() == 3);  // the host's call, and the device's work twice
  REQUIRE(window.rows == std::vector<std::string>{"main", "device stream 0", "device stream 1"});
  for (const trace::Event& e : window.events) {
    REQUIRE(e.begin >= window.begin);
    REQUIRE(e.end <= window.end);
  }
}

}  // namespace
