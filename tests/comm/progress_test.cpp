// Nothing waits for what does not concern it: messages, collectives of several groups, busy devices. Every
// case here would hang if it did.
#include "core/base/error.h"
#include "parallel/comm/communicator.h"
#include "tests/catch.h"
#include "tests/comm/time_limit.h"
#include "tests/comm/world_fixture.h"

#include <thread>

using namespace nrl;
using namespace nrl::comm;

namespace {

Communicator& world() {
  return test_world().comm();
}

/// Above every eager limit: the receiver must answer before the data leaves.
constexpr size_t kLarge = 3'000'000;

}  // namespace

TEST_CASE("a message that was sent moves on while its sender waits in a collective", "[progress]") {
  const int n = world().size(), me = world().rank();
  if (n == 1) return;
  const TimeLimit limit("messages under a collective");
  std::vector<float> data(kLarge, static_cast<float>(me)), got(kLarge), sum = {1};
  for (int round = 0; round < 3; ++round) {
    // Rank 0 sends and enters the collective; the others enter it when the message is there.
    std::vector<Handle> sent;
    if (me == 0)
      for (int r = 1; r < n; ++r) sent.push_back(world().send_async(data, r));
    if (me != 0) world().recv(got, 0);
    world().all_reduce(sum);
    for (Handle& h : sent) h.wait();
  }
  REQUIRE(sum[0] == static_cast<float>(n * n * n));
  if (me != 0) REQUIRE(got == std::vector<float>(kLarge, 0.0f));
}

TEST_CASE("a message does not wait behind a collective that was issued before it", "[progress]") {
  const int n = world().size(), me = world().rank();
  if (n == 1) return;
  const TimeLimit limit("messages behind a collective");
  for (const size_t size : {size_t{1}, kLarge}) {
    std::vector<float> data(size, static_cast<float>(me)), got(size), sum = {1};
    if (me == 0) {
      Handle early = world().all_reduce_async(sum);
      for (int r = 1; r < n; ++r) world().send(data, r);
      early.wait();
    } else {
      world().recv(got, 0);
      world().all_reduce(sum);
    }
    REQUIRE(sum[0] == static_cast<float>(n));
  }
}

TEST_CASE("collectives of different groups do not wait for each other", "[progress]") {
  const int n = world().size(), me = world().rank();
  if (n == 1) return;
  const TimeLimit limit("collectives of two groups");
  const auto a = world().split(0, me, "a"), b = world().split(0, me, "b");
  for (const size_t size : {size_t{3}, size_t{100'000}}) {
    std::vector<float> x(size, 1.0f), y(size, 2.0f);
    if (me == 0) {
      Handle first = a->all_reduce_async(x);
      b->all_reduce(y);
      first.wait();
    } else {
      Handle first = b->all_reduce_async(y);
      a->all_reduce(x);
      first.wait();
    }
    REQUIRE(x == std::vector<float>(size, static_cast<float>(n)));
    REQUIRE(y == std::vector<float>(size, static_cast<float>(2 * n)));
  }
}
