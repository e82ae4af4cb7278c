// Channels on every backend, the one with a single FIFO for everything included.
#include "parallel/comm/channel.h"

#include <algorithm>
#include <array>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/comm/backends.h"
#include "tests/comm/time_limit.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using namespace nrl::comm;

namespace {

template <class F>
void on_all(F f) {
  if (test_world().size() == 1) return;
  for (const auto& backend : backends()) {
    INFO(backend->name());
    const TimeLimit limit("channels on " + backend->name());
    f(*backend);
  }
}

}  // namespace

TEST_CASE("messages of a channel come in order, those of channels both ways do not wait for each other",
          "[channel]") {
  on_all([](Backend& backend) {
    const int n = backend.comm().size(), me = backend.comm().rank();
    const int next = (me + 1) % n, last = (me + n - 1) % n;
    // A ring, both ways round; ranks name their ends in different orders.
    std::vector<ChannelEnd> ends = {{next, Direction::send},
                                    {last, Direction::receive},
                                    {last, Direction::send},
                                    {next, Direction::receive}};
    if (n == 2) ends.resize(2);
    if (me % 2 == 1) std::swap(ends[0], ends[1]);
    Channels channels(backend.comm(), ends);
    for (size_t size : {size_t{5}, size_t{300000}}) {  // below and above the eager limits
      for (const bool forward : {true, false}) {
        if (n == 2 && !forward) continue;
        Channel& to = channels.to(forward ? next : last);
        Channel& from = channels.from(forward ? last : next);
        // Every rank posts its receives first: with one FIFO for both no send would ever start.
        std::deque<Data<int32_t>> got, sent;
        std::vector<Handle> handles;
        for (int k = 0; k < 3; ++k)
          handles.push_back(
              from.receive_async(got.emplace_back(backend, size + static_cast<size_t>(k)), backend.stream()));
        for (int k = 0; k < 3; ++k)
          handles.push_back(to.send_async(
              sent.emplace_back(backend, size + static_cast<size_t>(k), 100 * me + k), backend.stream()));
        for (Handle& h : handles) h.wait();
        for (int k = 0; k < 3; ++k)
          REQUIRE(got[k].read() ==
                  std::vector<int32_t>(size + static_cast<size_t>(k), 100 * from.peer() + k));
      }
    }
  });
}

TEST_CASE("a pipeline of sends and receives that overlap runs through", "[channel]") {
  // One forward and one backward a step (1F1B), all messages asynchronous, gradient receives posted early.
  on_all([](Backend& backend) {
    const int n = backend.comm().size(), me = backend.comm().rank(), microbatches = 6;
    std::vector<ChannelEnd> ends;
    if (me > 0) ends.insert(ends.end(), {{me - 1, Direction::receive}, {me - 1, Direction::send}});
    if (me < n - 1) ends.insert(ends.end(), {{me + 1, Direction::send}, {me + 1, Direction::receive}});
    Channels channels(backend.comm(), ends);
    Channel* input = me > 0 ? &channels.from(me - 1) : nullptr;
    Channel* input_gradient = me > 0 ? &channels.to(me - 1) : nullptr;
    Channel* output = me < n - 1 ? &channels.to(me + 1) : nullptr;
    Channel* output_gradient = me < n - 1 ? &channels.from(me + 1) : nullptr;
    constexpr size_t message_size = 40000;
    std::deque<Data<int32_t>> memory;
    std::vector<Handle> sent;
    std::deque<Handle> gradients;
    std::deque<Data<int32_t>*> expected;
    int64_t wrong = 0;
    const auto backward = [&](int k) {
      if (output_gradient) {
        gradients.front().wait();
        gradients.pop_front();
        wrong += expected.front()->read() != std::vector<int32_t>(message_size, 1000 * (me + 1) + k);
        expected.pop_front();
      }
      if (input_gradient)
        sent.push_back(input_gradient->send_async(memory.emplace_back(backend, message_size, 1000 * me + k),
                                                  backend.stream()));
    };
    int done = 0;
    for (int k = 0; k < microbatches; ++k) {
      if (output_gradient) {
        expected.push_back(&memory.emplace_back(backend, message_size));
        gradients.push_back(output_gradient->receive_async(*expected.back(), backend.stream()));
      }
      if (input) {
        Data<int32_t>& x = memory.emplace_back(backend, message_size);
        input->receive_async(x, backend.stream()).wait();
        wrong += x.read() != std::vector<int32_t>(message_size, 10 * (me - 1) + k);
      }
      if (output)
        sent.push_back(
            output->send_async(memory.emplace_back(backend, message_size, 10 * me + k), backend.stream()));
      if (k >= n - 1 - me) backward(done++);
    }
    while (done < microbatches) backward(done++);
    for (Handle& h : sent) h.wait();
    REQUIRE(wrong == 0);
  });
}

TEST_CASE("channels of several lanes between two ranks do not wait for each other", "[channel]") {
  on_all([](Backend& backend) {
    const int me = backend.comm().rank();
    std::vector<ChannelEnd> ends;
    if (me == 0) ends = {{1, Direction::send, 1}, {1, Direction::send, 0}};
    if (me == 1) ends = {{0, Direction::receive, 0}, {0, Direction::receive, 1}};
    Channels channels(backend.comm(), ends);
    constexpr size_t size = 300000;  // above the eager limits
    if (me == 0) {
      Data<int32_t> first(backend, size, 10), second(backend, size, 11);
      Handle a = channels.to(1, 0).send_async(first, backend.stream());
      Handle b = channels.to(1, 1).send_async(second, backend.stream());
      a.wait();
      b.wait();
    }
    if (me == 1) {  // in the other order
      Data<int32_t> second(backend, size), first(backend, size);
      channels.from(0, 1).receive_async(second, backend.stream()).wait();
      channels.from(0, 0).receive_async(first, backend.stream()).wait();
      REQUIRE(first.read() == std::vector<int32_t>(size, 10));
      REQUIRE(second.read() == std::vector<int32_t>(size, 11));
    }
  });
}

TEST_CASE("the log numbers messages alike at both ends of their channel", "[channel]") {
  on_all([](Backend& backend) {
    CollectiveLog* log = backend.comm().collective_log();
    if (!log) return;
    const int me = backend.comm().rank();
    std::vector<ChannelEnd> ends;
    if (me == 0) ends = {{1, Direction::send, 1}, {1, Direction::send, 0}};
    if (me == 1) ends = {{0, Direction::receive, 0}, {0, Direction::receive, 1}};
    Channels channels(backend.comm(), ends);
    log->record();
    Data<int32_t> data(backend, 10);
    for (int k = 0; k < 3; ++k)
      for (const int lane : {0, 1, 1}) {
        if (me == 0) channels.to(1, lane).send_async(data, backend.stream()).wait();
        if (me == 1) channels.from(0, lane).receive_async(data, backend.stream()).wait();
      }
    if (me < 2) (void)data.read();  // a device has done them
    std::vector<std::pair<int, int64_t>> numbers;
    for (const LogEntry& entry : log->take())
      if (entry.op == Op::send || entry.op == Op::recv) numbers.emplace_back(entry.lane, entry.message);
    std::sort(numbers.begin(), numbers.end());
    std::string text;
    for (const auto& [lane, message] : numbers) text += fmt::format("{} {},", lane, message);
    const std::vector<std::string> texts = backend.comm().gather_texts(text);
    REQUIRE(texts[0] == texts[1]);
    if (me < 2 && !numbers.empty()) REQUIRE(numbers.size() % 9 == 0);
  });
}

TEST_CASE("channels do not wait for a collective that was issued before", "[channel]") {
  on_all([](Backend& backend) {
    if (backend.blocks) return;
    const int me = backend.comm().rank();
    std::vector<ChannelEnd> ends;
    if (me == 0) ends = {{1, Direction::send}};
    if (me == 1) ends = {{0, Direction::receive}};
    Channels channels(backend.comm(), ends);
    Data<int32_t> sum(backend, 1000, 1), message(backend, 1000, me);
    if (me == 1)
      channels.from(0).receive_async(message, backend.stream()).wait();  // before its part of the sum
    Handle h = backend.comm().all_reduce_async(sum, Reduce::sum, backend.stream());
    if (me == 0) channels.to(1).send_async(message, backend.stream()).wait();
    h.wait();
    REQUIRE(sum.read().back() == backend.comm().size());
    if (me == 1) REQUIRE(message.read().back() == 0);
  });
}

TEST_CASE("a channel that only one of its ranks requests is an error on all", "[channel]") {
  on_all([](Backend& backend) {
    if (!backend.comm().single_fifo()) return;  // tags need no agreement
    const int n = backend.comm().size(), me = backend.comm().rank();
    std::vector<ChannelEnd> ends = {{(me + 1) % n, Direction::send}, {(me + n - 1) % n, Direction::receive}};
    if (me == 1) ends.pop_back();
    try {
      const Channels channels(backend.comm(), ends);
      FAIL();
    } catch (const Error& e) {
      REQUIRE(std::string(e.what()).find("channel 0>1 of ") != std::string::npos);
    }
    // A wrong end of one rank as well.
    if (me == 1) ends.push_back({n, Direction::receive});
    REQUIRE_THROWS_AS(Channels(backend.comm(), ends), Error);
  });
}

TEST_CASE("a channel to oneself, one opened twice and the wrong way round are refused", "[channel]") {
  Communicator& world = test_world().comm();
  const auto open = [&](std::vector<ChannelEnd> ends) { return std::make_unique<Channels>(world, ends); };
  REQUIRE_THROWS_AS(open({{world.rank(), Direction::send}}), Error);
  REQUIRE_THROWS_AS(open({{world.size(), Direction::send}}), Error);
  if (world.size() == 1) return;
  const int peer = (world.rank() + 1) % world.size();
  REQUIRE_THROWS_AS(open({{peer, Direction::send}, {peer, Direction::send}}), Error);
  std::vector<float> x(1);
  REQUIRE_THROWS_AS(open({{peer, Direction::receive}})->from(peer).send_async(x), Error);
  REQUIRE_THROWS_AS(open({{peer, Direction::send}})->to(peer).receive_async(x), Error);
  REQUIRE_THROWS_AS(open({{peer, Direction::send}})->from(peer), Error);
}
