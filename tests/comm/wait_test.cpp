// A rank that waits leaves the core to others.
#include "tests/catch.h"
#include "tests/comm/world_fixture.h"

#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

using namespace nrl;
using namespace nrl::comm;

namespace {

/// Processor time of this process, all threads, in seconds.
double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Processor time that the ranks which came early spend in `meet` for each second that the last one keeps
/// them waiting.
template <class F>
double share_while_waiting(F meet) {
  Communicator& world = test_world().comm();
  constexpr auto kLate = std::chrono::milliseconds(400);
  meet();  // connections and windows are made
  world.barrier();
  const double before = cpu_seconds();
  if (world.rank() == world.size() - 1) std::this_thread::sleep_for(kLate);
  meet();
  return (cpu_seconds() - before) / std::chrono::duration<double>(kLate).count();
}

}  // namespace

TEST_CASE("waiting for another rank takes no processor time to speak of", "[comm]") {
  Communicator& world = test_world().comm();
  if (world.size() == 1) return;
  std::vector<float> small(1), large(100000);
  const auto reduce = [&](std::vector<float>& data) { world.all_reduce(data, Reduce::sum); };
  REQUIRE(share_while_waiting([&] { world.barrier(); }) < 0.1);
  REQUIRE(share_while_waiting([&] { reduce(small); }) < 0.1);
  REQUIRE(share_while_waiting([&] { reduce(large); }) < 0.1);
  REQUIRE(share_while_waiting([&] { world.all_reduce_async(View(large), Reduce::sum, {}).wait(); }) < 0.1);
  const int next = (world.rank() + 1) % world.size(), last = (world.rank() + world.size() - 1) % world.size();
  std::vector<float> in(1);
  REQUIRE(share_while_waiting([&] {
            world.exchange({Message::send(View(small), next), Message::recv(View(in), last)});
          }) < 0.1);
}
