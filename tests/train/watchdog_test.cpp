#include "apps/train/launch/watchdog.h"

#include "apps/train/launch/run_control.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::train;

namespace {

// A process that completes a step every `seconds`, looked at once a second.
struct Process {
  status::Page page;
  Watchdog watchdog;
  double now = 100;
  explicit Process(const WatchdogLimits& limits = {}) : watchdog(limits) {}

  Watchdog::Finding steps(int count, double seconds) {
    page.phase = status::Phase::computing;
    Watchdog::Finding found;
    for (int i = 0; i < count; ++i) {
      now += seconds;
      page.completed = page.completed + 1;
      page.progress = page.progress + 100;
      found = watchdog.look(page, now);
    }
    return found;
  }
  Watchdog::Finding silence(double seconds) {
    Watchdog::Finding found;
    for (double end = now + seconds; now < end;) {
      now += 1;
      found = watchdog.look(page, now);
    }
    return found;
  }
};

}  // namespace

TEST_CASE("the limit is learned from the steps", "[watchdog]") {
  Process p;
  CHECK(p.watchdog.look(p.page, p.now).limit_s == 1800);  // while it starts
  CHECK(p.steps(2, 10).limit_s == 600);
  const auto found = p.steps(20, 10);
  CHECK(found.median_step_s == Approx(10.0));
  CHECK(found.limit_s == Approx(200.0));
  CHECK(!p.silence(199).over);
  CHECK(p.silence(3).over);
  CHECK(Process().steps(10, 0.1).limit_s == 60);
}

TEST_CASE("any progress counts, in every phase", "[watchdog]") {
  Process p;
  p.steps(5, 1);
  for (int i = 0; i < 100; ++i) {
    p.page.progress = p.page.progress + 1;
    REQUIRE(!p.silence(50).over);
  }
  for (const status::Phase phase :
       {status::Phase::data, status::Phase::evaluation, status::Phase::checkpoint}) {
    p.page.phase = phase;
    CHECK(p.silence(1).limit_s == 600);
  }
  p.silence(496);
  CHECK(!p.silence(40).over);
  CHECK(p.silence(100).over);
  p.page.progress = p.page.progress + 1;
  CHECK(!p.silence(1).over);
}

TEST_CASE("a hang that ended by itself does not raise the limit", "[watchdog]") {
  Process p;
  p.steps(10, 5);
  for (int i = 0; i < 10; ++i) p.steps(1, 500);
  CHECK(p.steps(1, 5).limit_s <= 20 * 15 + 1);
}

TEST_CASE("a given limit is of every phase", "[watchdog]") {
  Process p({.seconds = 7});
  p.page.phase = status::Phase::evaluation;
  p.watchdog.look(p.page, p.now);
  CHECK(!p.silence(6).over);
  CHECK(p.silence(3).over);
}

TEST_CASE("limits of a configuration", "[watchdog]") {
  ReliabilityConfig config;
  CHECK(watchdog_limits(config).seconds == 0);
  config.step_timeout_seconds = 5;
  CHECK(watchdog_limits(config).seconds == 5);
  config.control = ControlMode::require;
  config.interface = "eth1";
  config.heartbeat_timeout_seconds = 3;
  CHECK(control_options(config).require);
  CHECK(control_options(config).interface == "eth1");
  CHECK(control_options(config).heartbeat_timeout_s == 3);
}
