// The status page of a process, and times of steps.

#include "core/base/status.h"

#include <unistd.h>

#include "core/base/clock.h"
#include "core/base/step_times.h"
#include "tests/catch.h"

using namespace nrl;

TEST_CASE("time of a phase counts as own without the waits for other ranks", "[base]") {
  status::Page page;
  status::place(&page);
  const auto own = [&](status::Phase phase) { return page.own_ns[static_cast<size_t>(phase)].load(); };
  status::enter(status::Phase::between);
  status::enter(status::Phase::computing);
  const double begin = steady_seconds();
  ::usleep(60'000);
  page.waited_ns += 50'000'000;  // as Work::wait()
  status::enter(status::Phase::data);
  const auto lasted = static_cast<int64_t>((steady_seconds() - begin) * 1e9);
  CHECK(own(status::Phase::computing) >= 10'000'000);
  CHECK(own(status::Phase::computing) <= lasted - 50'000'000 + 1'000'000);
  CHECK(own(status::Phase::data) == 0);
  ::usleep(20'000);
  const int64_t before = own(status::Phase::computing);
  status::enter(status::Phase::computing);
  CHECK(own(status::Phase::data) >= 20'000'000);  // the waits of another phase do not count
  CHECK(own(status::Phase::computing) == before);
  status::place(nullptr);
  CHECK(status::page().own_ns[static_cast<size_t>(status::Phase::data)] == own(status::Phase::data));
}

TEST_CASE("the median of steps is known after three, and a step that hung does not raise it", "[base]") {
  StepTimes times;
  for (int i = 0; i < 2; ++i) times.add(2);
  CHECK(!times.known());
  CHECK(times.median() == 0);
  CHECK(times.limit(20, 60) == 60);
  times.add(2);
  CHECK(times.median() == 2);
  CHECK(times.limit(20, 10) == 40);
  CHECK(times.limit(20, 60) == 60);
  for (int i = 0; i < 5; ++i) times.add(1000);  // count as 6
  CHECK(times.median() == 6);
  for (size_t i = 0; i < StepTimes::history; ++i) times.add(1);
  CHECK(times.median() == 1);
}
