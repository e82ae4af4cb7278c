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
