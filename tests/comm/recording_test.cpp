#include "parallel/comm/recording/recording.h"

#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using namespace nrl::comm;

namespace {
Communicator& world() {
  return test_world().comm();
}
std::unique_ptr<Communicator> group(const char* name) {
  return world().split(0, world().rank(), name);
}
}  // namespace

TEST_CASE("a recording group works as the group below it", "[comm]") {
  const auto recorder = std::make_shared<Recorder>();
  const auto c = make_recording(group("r"), recorder, RecordingMode::check);
  std::vector<float> x = {1}, y(static_cast<size_t>(world().size()));
  c->all_reduce(x);
  REQUIRE(x[0] == static_cast<float>(world().size()));
  Handle h = c->all_gather_async(x, y);
  REQUIRE(c->outstanding() == 1);
  h.wait();
  REQUIRE(c->outstanding() == 0);
  REQUIRE(y.back() == x[0]);
  const auto part = c->split(0, world().rank(), "part");
  part->barrier();
  REQUIRE(recorder->entries().size() == 4);
  REQUIRE(recorder->entries()[0].call == "all_reduce(1 f32 sum)");
  REQUIRE(recorder->entries()[3].call == "barrier()");
  REQUIRE(order_mismatch(world(), *recorder).empty());
}

TEST_CASE("ranks that call different collectives get an error instead of a deadlock", "[comm]") {
  if (world().size() < 2) return;
  const auto c = make_recording(group("m"), std::make_shared<Recorder>(), RecordingMode::check);
  std::vector<float> x(8), y(8 * static_cast<size_t>(world().size()));
  c->barrier();
  try {
    if (world().rank() == world().size() - 1) {
      c->all_gather(x, y);
    } else {
      c->all_reduce(x);
    }
    FAIL();
  } catch (const Error& e) {
    REQUIRE(e.code() == Exit::internal);
    const std::string text = e.what();
    REQUIRE(text.find("order mismatch at #1 on m[") != std::string::npos);
    REQUIRE(text.find("all_reduce(8 f32 sum)") != std::string::npos);
    REQUIRE(text.find("all_gather(8 f32)") != std::string::npos);
  }
}

TEST_CASE("a different interleaving of two groups is found", "[comm]") {
  if (world().size() < 2) return;
  const auto recorder = std::make_shared<Recorder>();
  const auto a = make_recording(make_recording(group("a"), std::make_shared<Recorder>(), RecordingMode::log),
                                recorder, RecordingMode::log);
  const auto b = make_recording(group("b"), recorder, RecordingMode::log);
  // Only rank 1 announces b first; zero-size collectives need no partner, so that the test
  // itself cannot hang.
  std::vector<float> nothing;
  if (world().rank() == 1) {
    b->all_reduce(nothing);
    a->all_reduce(nothing);
  } else {
    a->all_reduce(nothing);
    b->all_reduce(nothing);
  }
  const std::string text = order_mismatch(world(), *recorder);
  REQUIRE(text.find("order mismatch at #0 between rank 0 and rank 1") == 0);
}

TEST_CASE("groups used in different orders end only where their kernels fit side by side", "[comm]") {
  using Order = LaunchRules::Order;
  LaunchModel model(2);
  const std::vector<MeetingPoint> a{{"a", 2}}, b{{"b", 2}};
  model.issue(0, "a", a, "sum of a");
  model.issue(0, "b", b, "sum of b");
  model.issue(1, "b", b, "sum of b");
  model.issue(1, "a", a, "sum of a");
  CHECK(model.streams() == 2);
  CHECK(model.hang({Order::free}) == "");
  CHECK(model.hang({Order::free, 2}) == "");
  CHECK(model.hang({Order::free, 1}) ==
        "rank 0: #0 sum of a waits for its partner; rank 1: #0 sum of b waits for its partner");
  CHECK(model.hang({Order::issued}) == "");  // all start
  CHECK(model.hang({Order::serial}) != "");
  SECTION("nor where a rank waits between them") {
    LaunchModel waits(2);
    waits.wait(0, waits.issue(0, "a", a, "sum of a"));
    waits.issue(0, "b", b, "sum of b");
    waits.wait(1, waits.issue(1, "b", b, "sum of b"));
    waits.issue(1, "a", a, "sum of a");
    CHECK(waits.hang({Order::free}) ==
          "rank 0: #0 sum of a waits for its partner; rank 1: #0 sum of b waits for its partner");
  }
  SECTION("nor where an operation comes after one of the other group") {
    LaunchModel chained(2);
    chained.issue(0, "b", b, "sum of b", chained.issue(0, "a", a, "sum of a"));
    chained.issue(1, "a", a, "sum of a", chained.issue(1, "b", b, "sum of b"));
    CHECK(chained.hang({Order::free}) != "");
  }
  SECTION("nor where a rank is missing") {
    LaunchModel alone(2);
    alone.issue(0, "a", a, "sum of a");
    CHECK(alone.hang({Order::free}) == "rank 0: #0 sum of a waits for its partner");
  }
}

TEST_CASE("recorded operations and waits are what the model is asked about", "[comm]") {
  if (world().size() < 2) return;
  const auto recorder = std::make_shared<Recorder>();
  const auto c = make_recording(group("l"), recorder, RecordingMode::log);
  std::vector<float> x(4), y(4);
  const int last = c->size() - 1;
  Handle sum = c->all_reduce_async(x);
  // A channel: a stream of its own, so the message does not wait for the sum.
  if (c->rank() == 0) c->send_async(y, last, 5, {sum}).wait();
  if (c->rank() == last) c->recv_async(y, 0, 5).wait();
  sum.wait();
  const LaunchModel model = recorded_launches(world(), *recorder);
  CHECK(model.operations() == c->size() + 2);
  CHECK(model.streams() == 2);
  CHECK(model.hang({}) == "");
  recorder->clear();
  CHECK(recorded_launches(world(), *recorder).operations() == 0);
}
