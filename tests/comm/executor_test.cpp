// The executor's logic without MPI; run under the thread sanitizer.
#include "parallel/comm/executor.h"

#include <thread>

#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::comm;

namespace {

class TestWork : public Work {
 public:
  TestWork(Executor* e, CollectiveLog* log, const LogTicket& ticket, std::vector<int>* order, int id,
           int polls)
      : Work(log, ticket, e, nullptr), order_(order), id_(id), polls_(polls) {}

 protected:
  Advance start() override {
    order_->push_back(id_);  // one at a time: no lock
    if (id_ < 0) fail(Exit::internal, "work {}", id_);
    return polls_ == 0 ? Advance::done : Advance::waiting;
  }
  Advance poll() override { return --polls_ <= 0 ? Advance::done : Advance::waiting; }

 private:
  std::vector<int>* order_;
  int id_, polls_;
};

}  // namespace

TEST_CASE("work starts in order, in any thread", "[comm]") {
  CollectiveLog log;
  const uint32_t group = log.add_group("g", "g[0]");
  std::vector<int> order;
  {
    Executor executor;
    std::vector<std::shared_ptr<TestWork>> all;
    for (int i = 0; i < 2000; ++i) {
      const auto ticket = log.enqueue(group, static_cast<uint64_t>(i), Op::barrier, DType::u8, 1, -1);
      all.push_back(std::make_shared<TestWork>(&executor, &log, ticket, &order, i, i % 3 == 0 ? 2 : 0));
      const bool blocking = i % 5 == 0;
      executor.submit(all.back(), {}, blocking);
      if (blocking) all.back()->wait();
    }
    for (size_t i = 0; i < all.size(); ++i)
      if (i % 5 != 0) all[i]->wait();
  }
  REQUIRE(order.size() == 2000);
  for (int i = 0; i < 2000; ++i) REQUIRE(order[i] == i);
  REQUIRE(log.totals().at(0).count == 2000);
  REQUIRE(log.latest().size() == 2000);
  for (const LogEntry& e : log.latest()) REQUIRE(e.progress == Progress::done);
}

TEST_CASE("two threads may wait at once", "[comm]") {
  Executor executor;
  std::vector<int> order;
  const auto run = [&] {
    for (int i = 0; i < 300; ++i) {
      auto w = std::make_shared<TestWork>(&executor, nullptr, LogTicket{}, &order, 1, i % 4);
      executor.submit(w, {}, i % 2 == 0);
      w->wait();
    }
  };
  std::thread other(run);
  run();
  other.join();
  REQUIRE(order.size() == 600);
}

TEST_CASE("an error reaches its waiter only", "[comm]") {
  Executor executor;
  std::vector<int> order;
  auto bad = std::make_shared<TestWork>(&executor, nullptr, LogTicket{}, &order, -1, 0);
  auto good = std::make_shared<TestWork>(&executor, nullptr, LogTicket{}, &order, 2, 0);
  executor.submit(bad, {}, false);
  executor.submit(good, {}, false);
  good->wait();
  REQUIRE_THROWS_AS(bad->wait(), Error);
}

TEST_CASE("an executor with work that never ends can be destroyed", "[comm]") {
  std::vector<int> order;
  Executor executor;
  executor.submit(std::make_shared<TestWork>(&executor, nullptr, LogTicket{}, &order, 1, 1 << 30), {}, false);
}
