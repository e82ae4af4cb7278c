#include "parallel/comm/collective_log.h"

#include "core/base/error.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/self/self_comm.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::comm;

TEST_CASE("the ring keeps the latest entries and the totals keep all", "[comm]") {
  CollectiveLog log;
  const uint32_t a = log.add_group("dp", "dp[0,1]"), b = log.add_group("dp", "dp[2,3]");
  LogTicket first = log.enqueue(a, 0, Op::all_reduce, DType::f32, 4, -1);
  for (uint64_t i = 0; i < CollectiveLog::capacity + 10; ++i) {
    LogTicket t = log.enqueue(b, i, Op::all_reduce, DType::f32, 4, -1);
    log.start(t);
    log.finish(t, false);
    log.expose(t, 1000);
  }
  log.start(first);  // its ring entry is another's by now
  log.finish(first, true);
  const auto latest = log.latest();
  REQUIRE(latest.size() == CollectiveLog::capacity);
  for (size_t i = 0; i < latest.size(); ++i) {
    REQUIRE(latest[i].id == 11 + i);
    REQUIRE(latest[i].progress == Progress::done);
    REQUIRE(latest[i].exposed_ns == 1000);
  }
  const auto totals = log.totals();
  REQUIRE(totals.size() == 1);
  REQUIRE(totals[0].count == static_cast<int64_t>(CollectiveLog::capacity) + 11);
  REQUIRE(totals[0].exposed_seconds == Approx(1e-6 * (CollectiveLog::capacity + 10)));
  REQUIRE(log.group_label(b) == "dp[2,3]");
}

TEST_CASE("a window keeps all operations that are issued and end in it", "[comm]") {
  CollectiveLog log;
  const uint32_t group = log.add_group("dp", "dp[0,3]", 2, {0, 3});
  const auto issue = [&](uint64_t seq) { return log.enqueue(group, seq, Op::all_reduce, DType::f32, 4, -1); };
  const auto run = [&](LogTicket t) {
    log.start(t);
    log.finish(t, false);
    log.expose(t, 7);
  };
  LogTicket before = issue(0);
  log.record();
  run(before);  // issued before the window
  const uint64_t number = CollectiveLog::capacity + 50;
  LogTicket first = issue(1), second = issue(2);
  run(second);
  for (uint64_t i = 3; i < number; ++i) run(issue(i));
  run(first);  // its entry of the ring is another's by now
  LogTicket open = issue(number), failed = issue(number + 1);
  log.start(failed);
  log.finish(failed, true);
  const std::vector<LogEntry> taken = log.take();
  log.start(open);
  REQUIRE(taken.size() == number - 1);
  CHECK(taken.front().seq == 2);
  CHECK(taken.back().seq == 1);  // by their start
  for (const LogEntry& entry : taken) {
    REQUIRE(entry.progress == Progress::done);
    REQUIRE(entry.exposed_ns == 7);
    REQUIRE(entry.enqueued_ns <= entry.started_ns);
    REQUIRE(entry.started_ns <= entry.ended_ns);
  }
  run(issue(number + 2));
  CHECK(log.take().empty());
  REQUIRE(log.groups().size() == 1);
  CHECK(log.groups()[0].name == "dp");
  CHECK(log.groups()[0].label == "dp[0,3]");
  CHECK(log.groups()[0].members == std::vector<int>{0, 3});
}

TEST_CASE("bytes on the wire are those that a rank must send", "[comm]") {
  CHECK(wire_bytes(Op::all_reduce, 100, 4) == 150);
  CHECK(wire_bytes(Op::reduce_scatter, 100, 4) + wire_bytes(Op::all_gather, 100, 4) ==
        wire_bytes(Op::all_reduce, 100, 4));
  CHECK(wire_bytes(Op::all_to_all, 100, 2) == 50);
  CHECK(wire_bytes(Op::send, 100, 2) == 100);
  CHECK(wire_bytes(Op::recv, 100, 2) == 0);  // counted where it is sent
  for (const Op op : {Op::all_reduce, Op::all_gather, Op::broadcast, Op::barrier})
    CHECK(wire_bytes(op, 100, 1) == 0);
  CollectiveLog log;
  const uint32_t group = log.add_group("dp", "dp[0,1,2,3]", 4);
  for (const int64_t bytes : {4, 192, 4})
    log.enqueue(group, 0, Op::all_reduce, DType::f32, bytes, -1, bytes < 100 ? "messages" : "shared memory");
  const std::vector<LogTotal> totals = log.totals();
  REQUIRE(totals.size() == 1);
  CHECK(totals[0].ranks == 4);
  CHECK(totals[0].algorithm == "shared memory");
  CHECK(totals[0].wire() == 300);
}

TEST_CASE("a handle that is not waited for is reported", "[comm]") {
  const int before = leaked_communicators();
  CollectiveLog log;
  std::vector<float> x = {1};
  {
    const auto c = make_self("lost", 0, &log);
    [[maybe_unused]] const Handle h = c->all_reduce_async(x);
    REQUIRE(c->outstanding() == 1);
  }
  REQUIRE(leaked_communicators() == before + 1);
  {
    const auto c = make_self("kept", 0, &log);
    c->all_reduce_async(x).wait();
  }
  REQUIRE(leaked_communicators() == before + 1);
}
