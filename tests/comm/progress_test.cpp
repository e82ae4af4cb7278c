// Independent operations do not wait for each other: messages, collectives of several groups, busy devices.
// Every case here would deadlock if they did.
#include <chrono>
#include <thread>

#include "core/base/error.h"
#include "parallel/comm/world/make_device.h"
#include "tests/catch.h"
#include "tests/comm/backends.h"
#include "tests/comm/busy_device.h"
#include "tests/comm/time_limit.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using namespace nrl::comm;

namespace {

Communicator& world() {
  return test_world().comm();
}

/// Above every eager limit: the receiver must answer before the data leaves.
constexpr size_t large = 3'000'000;

}  // namespace

TEST_CASE("a sent message makes progress while its sender waits in a collective", "[progress]") {
  const int n = world().size(), me = world().rank();
  if (n == 1) return;
  const TimeLimit limit("messages under a collective");
  std::vector<float> data(large, static_cast<float>(me)), got(large), sum = {1};
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
  if (me != 0) REQUIRE(got == std::vector<float>(large, 0.0f));
}

TEST_CASE("a message does not wait behind a collective that was issued before it", "[progress]") {
  const int n = world().size(), me = world().rank();
  if (n == 1) return;
  const TimeLimit limit("messages behind a collective");
  for (const size_t size : {size_t{1}, large}) {
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

TEST_CASE("an operation on a busy device blocks no other", "[progress]") {
  const int n = world().size(), me = world().rank();
  if (n == 1) return;
  const TimeLimit limit("a busy device");
  const auto device = std::make_shared<BusyDevice>();
  const auto other = world().split(0, me, "other");
  Backend backend(
      "staged",
      make_device_communicator(DeviceCommKind::staged, *other, *device, {.staged_slot_bytes = 1 << 14}),
      device);
  const int next = (me + 1) % n, last = (me + n - 1) % n;
  Data<float> sum(backend, 10000, 1.0f), sent(backend, 100, static_cast<float>(me)), got(backend, 100);
  device->busy = me == 0;
  Handle collective = backend.comm().all_reduce_async(sum, Reduce::sum, backend.stream());
  Handle send = backend.comm().send_async(sent, next, 0, backend.stream());
  Handle receive = backend.comm().recv_async(got, last, 0, backend.stream());
  // Neither host memory nor another group waits for rank 0's device.
  std::vector<float> host = {1}, message(1);
  for (int i = 0; i < 3; ++i) world().all_reduce(host);
  world().exchange({Message::send(host, next, 5), Message::recv(message, last, 5)});
  REQUIRE(message[0] == static_cast<float>(n * n * n));
  device->busy = false;
  receive.wait();
  send.wait();
  collective.wait();
  REQUIRE(sum.read() == std::vector<float>(10000, static_cast<float>(n)));
  REQUIRE(got.read() == std::vector<float>(100, static_cast<float>(last)));
}

TEST_CASE("messages of device memory leave in the order they were issued", "[progress]") {
  const int n = world().size(), me = world().rank();
  if (n == 1) return;
  const TimeLimit limit("order of device messages");
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const auto device = std::make_shared<BusyDevice>(device::SimOptions{.seed = seed});
    Backend backend(
        "staged",
        make_device_communicator(DeviceCommKind::staged, world(), *device, {.staged_slot_bytes = 1 << 14}),
        device);
    const int next = (me + 1) % n, last = (me + n - 1) % n;
    std::vector<std::unique_ptr<Data<int32_t>>> sent, got;
    std::vector<Handle> handles;
    for (int k = 0; k < 8; ++k) {
      const size_t size = k % 2 ? 3 : 100000;
      got.push_back(std::make_unique<Data<int32_t>>(backend, size));
      sent.push_back(std::make_unique<Data<int32_t>>(backend, size, k));
      handles.push_back(backend.comm().recv_async(*got.back(), last, 0, backend.stream()));
      handles.push_back(backend.comm().send_async(*sent.back(), next, 0, backend.stream()));
    }
    // The host's messages with the same tag are others.
    std::vector<float> mine = {static_cast<float>(me)}, theirs(1);
    world().exchange({Message::send(mine, next, 0), Message::recv(theirs, last, 0)});
    REQUIRE(theirs[0] == static_cast<float>(last));
    for (Handle& h : handles) h.wait();
    for (size_t k = 0; k < got.size(); ++k)
      REQUIRE(got[k]->read() == std::vector<int32_t>(k % 2 ? 3 : 100000, static_cast<int32_t>(k)));
  }
}

TEST_CASE("a call that was refused changes nothing for the next one", "[progress]") {
  const int n = world().size(), me = world().rank();
  const TimeLimit limit("an operation after a refused one");
  std::vector<float> a(3), b(4 * static_cast<size_t>(n));
  REQUIRE_THROWS_AS(world().all_gather(a, b), Error);
  if (n == 1) return;
  // Makes progress without a wait, like every asynchronous operation.
  Handle h = world().exchange_async(
      {Message::send(a, (me + 1) % n), Message::recv(std::span(b).first(3), (me + n - 1) % n)});
  while (!h.done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  h.wait();
}
