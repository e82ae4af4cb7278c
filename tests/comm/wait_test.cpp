// A rank that waits leaves the core to others.
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include <sys/resource.h>

#include "tests/catch.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using namespace nrl::comm;

namespace {

/// How often threads of this process have gone to sleep.
long sleeps_so_far() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_nvcsw;
}

/// How often this rank goes to sleep in `barrier` when the last rank comes 0.4 s late.
template <class F>
long sleeps_in(F barrier) {
  Communicator& world = test_world().comm();
  barrier();  // connections and windows are made
  world.barrier();
  const long before = sleeps_so_far();
  if (world.rank() == world.size() - 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
  barrier();
  return sleeps_so_far() - before;
}

}  // namespace

TEST_CASE("waiting for another rank is sleeping", "[comm]") {
  Communicator& world = test_world().comm();
  if (world.size() == 1) return;
  // Through shared memory a rank is woken once for each that it waits for; messages and other hosts are
  // polled for, at most every 0.25 ms once the wait is long.
  const long polled = 2200;
  const bool messages = std::getenv("NRL_TEST_SHARED_MIN") || test_world().nodes().back() > 0;
  const long woken = messages ? polled : 200;
  std::vector<float> small(1), large(20000), in(1);
  REQUIRE(sleeps_in([&] { world.barrier(); }) < woken);
  REQUIRE(sleeps_in([&] { world.all_reduce(small); }) < woken);
  REQUIRE(sleeps_in([&] { world.all_reduce(large); }) < woken);
  REQUIRE(sleeps_in([&] { world.all_reduce_async(large).wait(); }) < woken);
  const int next = (world.rank() + 1) % world.size(), last = (world.rank() + world.size() - 1) % world.size();
  REQUIRE(sleeps_in([&] { world.exchange({Message::send(small, next), Message::recv(in, last)}); }) < polled);
}
