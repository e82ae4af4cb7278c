#include "parallel/comm/ledger.h"
#include "core/base/error.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/self/self_comm.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::comm;

TEST_CASE("the ring keeps the latest entries and the totals keep all", "[comm]") {
  Ledger ledger;
  const uint32_t a = ledger.add_group("dp", "dp[0,1]"), b = ledger.add_group("dp", "dp[2,3]");
  LedgerTicket first = ledger.enqueue(a, 0, Op::all_reduce, DType::f32, 4, -1);
  for (uint64_t i = 0; i < Ledger::kCapacity + 10; ++i) {
    LedgerTicket t = ledger.enqueue(b, i, Op::all_reduce, DType::f32, 4, -1);
    ledger.start(t);
    ledger.finish(t, false);
    ledger.expose(t, 1000);
  }
  ledger.start(first);  // its ring entry is another's by now
  ledger.finish(first, true);
  const auto latest = ledger.latest();
  REQUIRE(latest.size() == Ledger::kCapacity);
  for (size_t i = 0; i < latest.size(); ++i) {
    REQUIRE(latest[i].id == 11 + i);
    REQUIRE(latest[i].progress == Progress::done);
    REQUIRE(latest[i].exposed_ns == 1000);
  }
  const auto totals = ledger.totals();
  REQUIRE(totals.size() == 1);
  REQUIRE(totals[0].count == static_cast<int64_t>(Ledger::kCapacity) + 11);
  REQUIRE(totals[0].exposed_seconds == Approx(1e-6 * (Ledger::kCapacity + 10)));
  REQUIRE(ledger.group_label(b) == "dp[2,3]");
}

TEST_CASE("a handle that nobody waits for is reported", "[comm]") {
  const int before = leaked_communicators();
  Ledger ledger;
  std::vector<float> x = {1};
  {
    const auto c = make_self("lost", 0, &ledger);
    [[maybe_unused]] const Handle h = c->all_reduce_async(x);
    REQUIRE(c->outstanding() == 1);
  }
  REQUIRE(leaked_communicators() == before + 1);
  {
    const auto c = make_self("kept", 0, &ledger);
    c->all_reduce_async(x).wait();
  }
  REQUIRE(leaked_communicators() == before + 1);
}
