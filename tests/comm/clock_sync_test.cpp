// Clocks of ranks that are planted apart come together, within the error that is stated.
#include "parallel/comm/world/clock_sync.h"

#include <chrono>
#include <cstdlib>
#include <thread>

#include "parallel/comm/collective_log.h"
#include "tests/catch.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;

namespace {

// Two ranks share a clock, which is seconds off the next one.
int64_t planted(int rank) {
  return int64_t{rank / 2} * 7'000'000'000 - int64_t{rank / 4} * 100'000'000'000;
}

comm::ClockOffset measured(const std::function<void()>& before, const std::function<void()>& after) {
  comm::Communicator& all = test_world().comm().host();
  return comm::clock_offset(all, std::to_string(all.rank() / 2), [&] {
    before();
    const int64_t now = comm::now_ns() + planted(all.rank());
    after();
    return now;
  });
}

void sleep_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

}  // namespace

TEST_CASE("planted offsets of clocks are found within the stated error", "[clock]") {
  const int rank = test_world().comm().rank();
  const auto none = [] {};
  const comm::ClockOffset own = measured(none, none);
  CAPTURE(rank, own.ns, own.error_ns);
  if (rank < 2) {
    CHECK(own.ns == 0);
    CHECK(own.error_ns == 0);
    return;
  }
  CHECK(own.error_ns > 0);
  CHECK(own.error_ns < 20'000'000);  // ranks may share a processor
  CHECK(std::abs(own.ns + planted(rank)) <= own.error_ns);
}

TEST_CASE("unequal delays widen the error, and the offset stays within it", "[clock]") {
  const int rank = test_world().comm().rank();
  const auto none = [] {};
  // A pause of rank 0 before its reading, and after it: the way there, or the way back, is longer.
  const std::function<void()> slow = [&] {
    if (rank == 0) sleep_ms(2);
  };
  for (const bool before : {true, false}) {
    const comm::ClockOffset own = before ? measured(slow, none) : measured(none, slow);
    CAPTURE(rank, before, own.ns, own.error_ns);
    if (rank < 2) continue;
    CHECK(own.error_ns > 900'000);
    CHECK(std::abs(own.ns + planted(rank)) <= own.error_ns);
  }
}

TEST_CASE("processes of one machine have one clock", "[clock]") {
  comm::Communicator& all = test_world().comm().host();
  CHECK(comm::clock_identity().size() > 20);
  const comm::ClockOffset own = comm::clock_offset(all);
  CHECK(own.ns == 0);
  CHECK(own.error_ns == 0);
}
