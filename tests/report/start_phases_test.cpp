#include "apps/train/report/start_phases.h"

#include <vector>

#include "tests/catch.h"

using namespace nrl;
using namespace nrl::train;

namespace {

struct Printed {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> phases;

  StartPhases::Print print() {
    return [this](std::string_view phase, double seconds) {
      const std::lock_guard lock(mutex);
      phases.push_back(seconds >= 0 ? std::string(phase) : "negative");
      changed.notify_all();
    };
  }
  bool wait_for(size_t count) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(30), [&] { return phases.size() >= count; });
  }
};

}  // namespace

TEST_CASE("a quick start prints nothing", "[report]") {
  Printed printed;
  StartPhases phases(printed.print(), std::chrono::hours(1));
  phases.begin("opening data");
  phases.begin("loading weights");
  phases.end();
  phases.end();
  REQUIRE(printed.phases.empty());
}

TEST_CASE("a slow start names each phase once, and a long one again", "[report]") {
  Printed printed;
  {
    StartPhases phases(printed.print(), std::chrono::milliseconds(5), std::chrono::hours(1));
    phases.begin("opening data");
    REQUIRE(printed.wait_for(1));
    phases.begin("loading weights");
    REQUIRE(printed.wait_for(2));
    phases.end();
    phases.begin("first step");
    REQUIRE(printed.wait_for(3));
  }
  REQUIRE(printed.phases == std::vector<std::string>{"opening data", "loading weights", "first step"});

  Printed repeated;
  StartPhases phases(repeated.print(), std::chrono::milliseconds(5), std::chrono::milliseconds(1));
  phases.begin("loading weights");
  REQUIRE(repeated.wait_for(2));
  phases.end();
  REQUIRE(repeated.phases[0] == repeated.phases[1]);
}
