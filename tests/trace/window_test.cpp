// Windows: the events of threads, their tags, and the edges.

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "core/trace/device_timeline.h"
#include "core/trace/trace.h"
#include "tests/catch.h"
#include "tests/sim/sim.h"

namespace {

using namespace nrl;
using trace::Event;
using trace::Kind;

std::vector<Event> named(const trace::Window& window, std::string_view name) {
  std::vector<Event> out;
  std::copy_if(window.events.begin(), window.events.end(), std::back_inserter(out),
               [&](const Event& e) { return e.name == name; });
  return out;
}

/// The events of every row are nested, ordered and inside of the window.
void check_shape(const trace::Window& window) {
  std::map<int, std::vector<Event>> open;
  int64_t last = window.begin;
  for (const Event& e : window.events) {
    REQUIRE(e.row < window.rows.size());
    REQUIRE(e.begin >= last);
    REQUIRE(e.end >= e.begin);
    REQUIRE(e.end <= window.end);
    last = e.begin;
    std::vector<Event>& stack = open[e.row];
    while (!stack.empty() && stack.back().end <= e.begin) stack.pop_back();
    if (!stack.empty()) REQUIRE(e.end <= stack.back().end);
    stack.push_back(e);
  }
}

TEST_CASE("a window has ranges with kind, call and tag", "[trace][window]") {
  trace::start(trace::Mode::timeline);
  REQUIRE(trace::recording_window());
  {
    const trace::TagScope outer({.step = 3, .microbatch = 1});
    const trace::Range phase("phase", Kind::phase);
    {
      trace::Tag tag = trace::tag();
      tag.layer = 7;
      const trace::TagScope inner(tag);
      const trace::Range op("op", Kind::op, 5);
      trace::tag().tick = 11;  // a range has the tag with which it was opened
    }
    const trace::Range late("late", Kind::wait);
  }
  const trace::Window window = trace::take();
  REQUIRE_FALSE(trace::recording_window());
  check_shape(window);
  REQUIRE(window.events.size() == 3);
  CHECK(window.rows == std::vector<std::string>{"main"});
  CHECK(window.dropped == 0);
  const Event phase = window.events[0], op = window.events[1], late = window.events[2];
  CHECK(phase.name == std::string("phase"));
  CHECK(phase.tag == trace::Tag{.step = 3, .microbatch = 1});
  CHECK(phase.call == trace::no_call);
  CHECK(op.kind == Kind::op);
  CHECK(op.call == 5);
  CHECK(op.tag == trace::Tag{.step = 3, .microbatch = 1, .layer = 7});
  CHECK(late.tag == phase.tag);
  CHECK(late.kind == Kind::wait);
  CHECK(trace::tag() == trace::Tag{});
  CHECK(trace::totals().size() == 3);  // totals go on
  { const trace::Range after("after"); }
  CHECK(trace::totals().size() == 4);
  CHECK(trace::take().events.empty());
  trace::start(trace::Mode::off);
}

TEST_CASE("ranges over the edges of a window are cut", "[trace][window]") {
  trace::start(trace::Mode::totals);
  trace::Window window;
  {
    const trace::Range epoch("epoch_1", Kind::phase);
    {
      const trace::Range before("before");
      trace::start(trace::Mode::timeline);
    }
    const trace::Range over("over");
    window = trace::take();
  }
  check_shape(window);
  REQUIRE(named(window, "epoch_1").size() == 1);
  REQUIRE(named(window, "before").size() == 1);
  REQUIRE(named(window, "over").size() == 1);
  CHECK(named(window, "epoch_1")[0].begin == window.begin);
  CHECK(named(window, "epoch_1")[0].end == window.end);
  CHECK(named(window, "before")[0].begin == window.begin);
  CHECK(named(window, "over")[0].end == window.end);
  trace::start(trace::Mode::off);
}

TEST_CASE("ranges beyond the space of a window are counted", "[trace][window]") {
  trace::start(trace::Mode::timeline, 1000);
  for (int i = 0; i < 5000; ++i) const trace::Range range("range");
  const trace::Window window = trace::take();
  CHECK(static_cast<int64_t>(window.events.size()) + window.dropped == 5000);
  CHECK(window.events.size() >= 1000);
  CHECK(window.dropped > 0);
  CHECK(trace::totals()[0].count == 5000);
  trace::start(trace::Mode::off);
}

TEST_CASE("threads have rows, also those that have ended", "[trace][window]") {
  trace::start(trace::Mode::timeline);
  std::thread([] {
    trace::name_thread("loader");
    const trace::Range range("elsewhere", Kind::data);
  }).join();
  const trace::Window window = trace::take();
  REQUIRE(named(window, "elsewhere").size() == 1);
  const Event e = named(window, "elsewhere")[0];
  CHECK(e.row > 0);
  trace::start(trace::Mode::off);
}

TEST_CASE("totals count every range of threads that come and go, and forget at a start", "[trace][window]") {
  trace::start(trace::Mode::totals);
  std::vector<std::string> names;
  for (int i = 0; i < 300; ++i) names.push_back("range " + std::to_string(i));
  const auto work = [&] {
    for (int i = 0; i < 3000; ++i) const trace::Range range(trace::intern(names[i % 300]));
  };
  for (int round = 0; round < 3; ++round) {
    std::thread a(work), b(work);
    a.join();
    b.join();
  }
  const std::vector<trace::Total> totals = trace::totals();
  REQUIRE(totals.size() == 300);
  for (const trace::Total& t : totals) CHECK(t.count == 60);
  trace::start(trace::Mode::totals);
  CHECK(trace::totals().empty());
  trace::start(trace::Mode::off);
}

TEST_CASE("windows open and close while threads record", "[trace][window]") {
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&] {
      while (!stop) {
        const trace::Range outer("outer");
        const trace::Range inner("inner");
      }
    });
  for (int i = 0; i < 200; ++i) {
    trace::start(trace::Mode::timeline, 4096);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    check_shape(trace::take());
    (void)trace::totals();
  }
  stop = true;
  for (std::thread& t : threads) t.join();
  trace::start(trace::Mode::off);
}

TEST_CASE("ranges of the device have the tag and the call of the host's", "[trace][window]") {
  const auto runtime = device::open_sim();
  const device::Stream stream(*runtime), copies(*runtime);
  trace::start(trace::Mode::timeline);
  trace::attach_device(*runtime, stream.get());
  {
    const trace::TagScope tag({.step = 2, .layer = 4});
    const trace::Range op("op", Kind::op, 9);
    device::sim_enqueue(stream.get(), [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
    const trace::DeviceRange copy("copy", copies.get(), Kind::copy);
    device::sim_enqueue(copies.get(), [] {});
  }
  runtime->synchronize();
  REQUIRE(trace::collect_device() == 0);
  const trace::Window window = trace::take();
  trace::detach_device();
  trace::start(trace::Mode::off);
  const std::vector<Event> ops = named(window, "op"), moved = named(window, "copy");
  REQUIRE(ops.size() == 2);  // of the host and of the device
  const Event on_device = window.rows[ops[0].row] == "main" ? ops[1] : ops[0];
  CHECK(window.rows[on_device.row] == trace::compute_row_name);
  CHECK(on_device.tag == trace::Tag{.step = 2, .layer = 4});
  CHECK(on_device.call == 9);
  CHECK(on_device.kind == Kind::op);
  CHECK(on_device.end - on_device.begin >= 2'000'000);
  REQUIRE(moved.size() == 1);
  CHECK(window.rows[moved[0].row] == "device stream 1");
  CHECK(moved[0].kind == Kind::copy);
  CHECK(moved[0].tag == trace::Tag{.step = 2, .layer = 4});
}

}  // namespace
