#include "apps/monitor/start_phases.h"

#include <vector>

#include "tests/catch.h"

using namespace nrl;
using namespace nrl::monitor;

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
  phases.begin("data", "opening data");
  phases.begin("weights", "loading weights");
  phases.end();
  phases.end();
  REQUIRE(printed.phases.empty());
}

TEST_CASE("a slow start names each phase once, and a long one again", "[report]") {
  Printed printed;
  {
    StartPhases phases(printed.print(), std::chrono::milliseconds(5), std::chrono::hours(1));
    phases.begin("data", "opening data");
    REQUIRE(printed.wait_for(1));
    phases.begin("weights", "loading weights");
    REQUIRE(printed.wait_for(2));
    phases.end();
    phases.begin("first step", "first step");
    REQUIRE(printed.wait_for(3));
  }
  REQUIRE(printed.phases == std::vector<std::string>{"opening data", "loading weights", "first step"});

  Printed repeated;
  StartPhases phases(repeated.print(), std::chrono::milliseconds(5), std::chrono::milliseconds(1));
  phases.begin("weights", "loading weights");
  REQUIRE(repeated.wait_for(2));
  phases.end();
  REQUIRE(repeated.phases[0] == repeated.phases[1]);
}

TEST_CASE("the parts of a start have the durations of their phases", "[report]") {
  StartPhases phases;
  const auto sleep = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
  phases.add("configuration", 1.5);
  phases.begin("data", "opening data");
  sleep(20);
  phases.begin("weights", "loading weights");
  phases.begin("data", "opening more data");
  sleep(20);
  phases.end();
  sleep(50);  // no part of the start
  phases.end();
  phases.add("library", 0.01, "data");
  phases.add_beside("weights", 2.5);
  const StartPhases::Seconds parts = phases.parts();
  REQUIRE(parts.size() == 4);
  CHECK(parts[0] == std::pair<std::string, double>("configuration", 1.5));
  CHECK(parts[1].first == "data");
  CHECK(parts[1].second >= 0.03);
  CHECK(parts[2].first == "weights");
  CHECK(parts[2].second < parts[1].second);
  CHECK(parts[3] == std::pair<std::string, double>("library", 0.01));
  const std::string text = phases.text();
  CHECK(text.starts_with("configuration 1.50, data 0.0"));
  CHECK(text.ends_with(", library 0.01 s; beside them: weights 2.50 s"));
}
