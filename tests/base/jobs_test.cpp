// Jobs on several threads.

#include "core/base/jobs.h"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/catch.h"

using namespace nrl;

TEST_CASE("Every job runs once, whatever the number of threads", "[jobs]") {
  for (const size_t threads : {1, 2, 5}) {
    std::vector<std::atomic<int>> runs(100);
    run_jobs(threads, runs.size(), [&](size_t i) { ++runs[i]; });
    for (const auto& count : runs) CHECK(count == 1);
  }
  run_jobs(3, 0, [](size_t) { FAIL("there is no job"); });
}

TEST_CASE("An error of a job is thrown when all threads have ended", "[jobs]") {
  for (const size_t failing : {0, 7, 49}) {
    std::atomic<int> running = 0;
    CHECK_THROWS_WITH(run_jobs(4, 50,
                               [&](size_t i) {
                                 ++running;
                                 std::this_thread::yield();
                                 --running;
                                 if (i == failing) throw std::runtime_error("job failed");
                               }),
                      "job failed");
    CHECK(running == 0);
  }
}
