// Chained operations without host waits: sums over shards and replicas.
#include "core/base/error.h"
#include "parallel/comm/communicator.h"
#include "tests/catch.h"
#include "tests/comm/backends.h"
#include "tests/comm/time_limit.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using namespace nrl::comm;

namespace {

/// Ranks in shards of this many; groups of one rank are part of the test.
void sum_hierarchically(Backend& backend, int shard_size) {
  const int n = backend.comm().size(), me = backend.comm().rank();
  const auto shard = backend.comm().split(me / shard_size, me, "shard");
  const auto replicas = backend.comm().split(me % shard_size, me, "replicas");
  for (int round = 0; round < 4; ++round) {
    const int64_t each = round % 2 ? 30011 : 7;
    std::vector<int32_t> values(static_cast<size_t>(each * shard_size));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int32_t>(i) * 3 + me + round;
    Data<int32_t> gradients(backend, values), own(backend, static_cast<size_t>(each), -1);
    Data<int32_t> all(backend, values.size(), -2);
    // Nothing is waited for in between.
    Handle sum = shard->reduce_scatter_async(gradients, own, Reduce::sum, backend.stream());
    Handle total = replicas->all_reduce_async(own, Reduce::sum, {backend.stream(), sum});
    Handle gathered = shard->all_gather_async(own, all, {backend.stream(), total});
    gathered.wait();
    total.wait();
    sum.wait();
    int64_t wrong = 0;
    const std::vector<int32_t>& got = all.read();
    for (size_t i = 0; i < got.size(); ++i)
      wrong += got[i] != n * (static_cast<int32_t>(i) * 3 + round) + n * (n - 1) / 2;
    INFO("shards of " << shard_size << ", round " << round);
    REQUIRE(wrong == 0);
  }
}

}  // namespace

TEST_CASE("a sum over shards and then over replicas needs no wait in between", "[after]") {
  const int n = test_world().size();
  for (const auto& backend : backends()) {
    INFO(backend->name());
    const TimeLimit limit("chained operations on " + backend->name());
    for (int shard_size = 1; shard_size <= n; ++shard_size)
      if (n % shard_size == 0) sum_hierarchically(*backend, shard_size);
  }
}

TEST_CASE("a message may come after another operation, and that after the message", "[after]") {
  const int n = test_world().size(), me = test_world().rank();
  if (n == 1) return;
  for (const auto& backend : backends()) {
    INFO(backend->name());
    const TimeLimit limit("chained messages on " + backend->name());
    // Passed on from rank to rank, every rank adding nothing but its place in the chain.
    Data<int32_t> data(*backend, 20000, me == 0 ? 5 : 0), sum(*backend, 1000, 1);
    Handle before = backend->comm().all_reduce_async(sum, Reduce::sum, backend->stream());
    Handle received, sent;
    if (me > 0) received = backend->comm().recv_async(data, me - 1, 0, {backend->stream(), before});
    if (me < n - 1)
      sent = backend->comm().send_async(data, me + 1, 0, {backend->stream(), me > 0 ? received : before});
    before.wait();
    received.wait();
    sent.wait();
    REQUIRE(data.read() == std::vector<int32_t>(20000, 5));
  }
}

TEST_CASE("an operation after a failed one fails with its error and is not started", "[after]") {
  Communicator& world = test_world().comm();
  if (world.size() < 2 || world.rank() > 1) return;
  const TimeLimit limit("a failed chain");
  std::vector<float> five(5), seven(7);
  if (world.rank() == 0) {
    world.send(five, 1, 9);
    world.recv(five, 1, 10);  // the next message of rank 1, not the one that follows the failed receive
    REQUIRE(five[0] == 1.0f);
    return;
  }
  Handle bad = world.recv_async(seven, 0, 9);
  Handle next = world.send_async(seven, 0, 10, bad);
  const auto text_of = [](Handle& h) {
    try {
      h.wait();
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const std::string first = text_of(bad), second = text_of(next);
  REQUIRE(first.find("received 20") != std::string::npos);
  REQUIRE(second == first);
  std::vector<float> good(5, 1.0f);
  world.send(good, 0, 10);
}
