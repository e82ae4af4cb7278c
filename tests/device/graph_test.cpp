// Captures and graphs of the simulated device.

#include <algorithm>
#include <set>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/sim/sim.h"

namespace {

using namespace nrl;
using device::Event;
using device::Graph;
using device::Memory;
using device::Stream;

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// A device with two streams, and work that notes that it ran.
struct Bench {
  explicit Bench(uint64_t seed = 1) : runtime(device::open_sim({.seed = seed})), a(*runtime), b(*runtime) {}
  void note(const Stream& stream, int what) {
    device::sim_enqueue(stream.get(), [this, what] { ran.push_back(what); });
  }
  std::unique_ptr<device::Runtime> runtime;
  Stream a, b;
  std::vector<int> ran;
};

/// 1 on a; 2 on b and 3 on a side by side; 4 on a after both.
Graph fork_and_join(Bench& t) {
  const Event forked(*t.runtime), joined(*t.runtime);
  t.runtime->begin_capture(t.a.get());
  t.note(t.a, 1);
  forked.record(t.a.get());
  forked.wait_in(t.b.get());
  t.note(t.b, 2);
  t.note(t.a, 3);
  joined.record(t.b.get());
  joined.wait_in(t.a.get());
  t.note(t.a, 4);
  return Graph(*t.runtime, t.runtime->end_capture(t.a.get()));
}

TEST_CASE("a graph runs what was captured, in the order of its events", "[graph]") {
  std::set<std::vector<int>> orders;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Bench t(seed);
    const Graph graph = fork_and_join(t);
    t.runtime->synchronize();
    REQUIRE(t.ran.empty());  // recorded, not run
    t.note(t.a, 0);
    graph.launch(t.a.get());
    t.note(t.a, 5);
    t.a.synchronize();
    orders.insert(t.ran);
    t.ran.clear();
    graph.launch(t.b.get());
    t.b.synchronize();
    REQUIRE(t.ran.size() == 4);
  }
  REQUIRE(orders == std::set<std::vector<int>>{{0, 1, 2, 3, 4, 5}, {0, 1, 3, 2, 4, 5}});
}

TEST_CASE("launches of one graph do not overlap", "[graph]") {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Bench t(seed);
    const Graph graph = fork_and_join(t);
    graph.launch(t.a.get());
    graph.launch(t.b.get());
    t.runtime->synchronize();
    REQUIRE(t.ran.size() == 8);
    REQUIRE(t.ran[3] == 4);
    REQUIRE(t.ran[4] == 1);
  }
}

TEST_CASE("a graph that was destroyed finishes", "[graph]") {
  Bench t;
  fork_and_join(t).launch(t.a.get());
  REQUIRE(t.ran.empty());
  t.a.synchronize();
  REQUIRE(t.ran.size() == 4);
}

TEST_CASE("work on other streams goes on beside a capture", "[graph]") {
  Bench t;
  t.runtime->begin_capture(t.a.get());
  t.note(t.b, 9);  // b has not joined
  const Graph graph(*t.runtime, t.runtime->end_capture(t.a.get()));
  t.b.synchronize();
  REQUIRE(t.ran == std::vector<int>{9});
  graph.launch(t.a.get());  // nothing was recorded
  t.a.synchronize();
  REQUIRE(t.ran.size() == 1);
}

TEST_CASE("a stream that is not joined back loses the graph", "[graph]") {
  Bench t;
  const Event forked(*t.runtime);
  t.runtime->begin_capture(t.a.get());
  t.note(t.a, 1);
  forked.record(t.a.get());
  forked.wait_in(t.b.get());
  t.note(t.b, 2);
  REQUIRE(contains(error_of([&] { t.runtime->end_capture(t.a.get()); }), "not joined back"));
  // Both streams are as before.
  t.note(t.b, 3);
  t.b.synchronize();
  REQUIRE(t.ran == std::vector<int>{3});
}

TEST_CASE("an exception inside a capture leaves its streams usable", "[graph]") {
  Bench t;
  const Event forked(*t.runtime);
  const std::string error = error_of([&] {
    device::Capture capture(*t.runtime, t.a.get());
    t.note(t.a, 1);
    forked.record(t.a.get());
    forked.wait_in(t.b.get());
    t.note(t.b, 2);
    fail(Exit::internal, "inside");
  });
  REQUIRE(error == "inside");
  REQUIRE(!t.runtime->capturing(t.a.get()));
  REQUIRE(!t.runtime->capturing(t.b.get()));
  t.note(t.a, 3);
  t.a.synchronize();
  t.note(t.b, 4);
  t.b.synchronize();
  REQUIRE(t.ran == std::vector<int>{3, 4});
  device::Capture capture(*t.runtime, t.a.get());
  t.note(t.a, 5);
  const Graph graph(*t.runtime, capture.end());
  graph.launch(t.a.get());
  t.a.synchronize();
  REQUIRE(t.ran == std::vector<int>{3, 4, 5});
}

TEST_CASE("a capture that fails to end is over", "[graph]") {
  Bench t;
  {
    device::Capture capture(*t.runtime, t.a.get());
    (void)error_of([&] { t.a.synchronize(); });
    REQUIRE(contains(error_of([&] { capture.end(); }), "the capture is invalid"));
  }
  t.note(t.a, 1);
  t.a.synchronize();
  REQUIRE(t.ran == std::vector<int>{1});
}

TEST_CASE("a capture that never ends is reported", "[graph]") {
  std::string problem;
  {
    const auto runtime = device::open_sim({.on_problem = [&](const std::string& text) { problem = text; }});
    const Stream stream(*runtime);
    runtime->begin_capture(stream.get());
  }
  REQUIRE(contains(problem, "a capture never ended"));
}

TEST_CASE("work behind a stall never runs", "[graph]") {
  Bench t;
  const Event before(*t.runtime), after(*t.runtime);
  before.record(t.a.get());
  device::sim_stall(*t.runtime, t.a.get());
  t.note(t.a, 1);
  after.record(t.a.get());
  t.note(t.b, 2);
  t.b.synchronize();
  for (int i = 0; i < 100; ++i) REQUIRE(!after.done());
  before.synchronize();
  REQUIRE(t.ran == std::vector<int>{2});
}

TEST_CASE("calls that break a capture", "[graph]") {
  Bench t;
  const Event outside(*t.runtime), unrecorded(*t.runtime);
  outside.record(t.b.get());
  const Memory pinned(*t.runtime, Memory::Kind::pinned, 16), x(*t.runtime, Memory::Kind::device, 16);
  std::vector<std::byte> pageable(16);
  const auto copy = [&](void* host) {
    t.runtime->copy(x.data(), host, 16, device::CopyKind::host_to_device, t.a.get());
  };
  struct Case {
    std::function<void()> call;
    std::string error;
  };
  for (const Case& c : std::vector<Case>{
           {[&] { t.a.synchronize(); }, "a stream that is being captured"},
           {[&] { t.b.synchronize(); }, "while this thread captures"},
           {[&] { t.runtime->synchronize(); }, "while a graph is being captured"},
           {[&] { outside.synchronize(); }, "while this thread captures"},
           {[&] { outside.wait_in(t.a.get()); }, "from outside"},
           {[&] { copy(pageable.data()); }, "pageable"},
           {[&] { (void)t.runtime->allocate(1); }, "while this thread captures"},
       }) {
    t.runtime->begin_capture(t.a.get());
    t.note(t.a, 1);
    const std::string error = error_of(c.call);
    INFO(error);
    REQUIRE(contains(error, c.error));
    REQUIRE(contains(error_of([&] { t.runtime->end_capture(t.a.get()); }), "the capture is invalid"));
  }
  // These do not.
  t.runtime->begin_capture(t.a.get());
  unrecorded.wait_in(t.a.get());
  copy(pinned.data());
  REQUIRE_NOTHROW(outside.done());
  REQUIRE_NOTHROW(Event(*t.runtime));
  const Graph graph(*t.runtime, t.runtime->end_capture(t.a.get()));
  t.runtime->synchronize();
}

TEST_CASE("memory released during a capture loses it", "[graph]") {
  Bench t;
  t.runtime->begin_capture(t.a.get());
  {
    // Allocated by another thread, to which the capture is nothing.
    Memory block;
    std::thread([&] {
      t.runtime->bind_thread();
      block = Memory(*t.runtime, Memory::Kind::device, 16);
    }).join();
  }
  REQUIRE(contains(error_of([&] { t.runtime->end_capture(t.a.get()); }), "memory was released"));
}

TEST_CASE("events of a capture tell nothing to the host", "[graph]") {
  Bench t;
  const Event event(*t.runtime);
  t.runtime->begin_capture(t.a.get());
  event.record(t.a.get());
  REQUIRE(contains(error_of([&] { (void)event.done(); }), "recorded in a capture"));
  const Graph graph(*t.runtime, t.runtime->end_capture(t.a.get()));
  REQUIRE(contains(error_of([&] { (void)event.done(); }), "recorded in a capture"));
  REQUIRE(contains(error_of([&] { event.synchronize(); }), "recorded in a capture"));
  REQUIRE(contains(error_of([&] { event.wait_in(t.b.get()); }), "recorded in a capture"));
  event.record(t.a.get());
  event.synchronize();
  REQUIRE(event.done());
}

TEST_CASE("captures begin and end once, where and by whom they began", "[graph]") {
  Bench t;
  REQUIRE(contains(error_of([&] { t.runtime->end_capture(t.a.get()); }), "no capture began"));
  t.runtime->begin_capture(t.a.get());
  REQUIRE(contains(error_of([&] { t.runtime->begin_capture(t.a.get()); }), "captured"));
  std::string elsewhere;
  std::thread([&] { elsewhere = error_of([&] { t.runtime->end_capture(t.a.get()); }); }).join();
  REQUIRE(contains(elsewhere, "another thread"));
  const Graph graph(*t.runtime, t.runtime->end_capture(t.a.get()));
  REQUIRE(contains(error_of([&] { t.runtime->launch(&t, t.a.get()); }), "no graph"));
}

TEST_CASE("an error in a graph stays", "[graph]") {
  Bench t;
  t.runtime->begin_capture(t.a.get());
  device::sim_enqueue(t.a.get(), [] { fail(Exit::internal, "node"); });
  t.note(t.a, 1);
  const Graph graph(*t.runtime, t.runtime->end_capture(t.a.get()));
  graph.launch(t.a.get());
  REQUIRE(error_of([&] { t.a.synchronize(); }) == "node");
  REQUIRE(error_of([&] { t.b.synchronize(); }) == "node");
  REQUIRE(t.ran.empty());
}

}  // namespace
