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
