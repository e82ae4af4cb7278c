// The leak test of a run, on the memory of this process.

#include "apps/train/loop/memory_watch.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "core/base/text.h"
#include "tests/catch.h"

using namespace nrl;

namespace {

/// What is warned of when 64 MB come into use between two samples.
std::vector<std::string> warnings_of_growth(const MonitoringConfig& config) {
  train::MemoryWatch watch(config, 0, nullptr);
  CHECK(watch.after_step(3).empty());
  std::vector<char> grown(size_t{64} << 20);
  std::memset(grown.data(), 1, grown.size());
  std::this_thread::sleep_for(std::chrono::milliseconds(210));  // the time between samples
  return watch.after_step(4);
}

}  // namespace

TEST_CASE("a rise in memory is reported unless monitoring is off") {
  MonitoringConfig config;
  config.memory_leak.step_increase_gb = 0.03;
  REQUIRE(warnings_of_growth(config).size() == 1);
  CHECK(warnings_of_growth(config).front().find("monitoring.memory_leak.step_increase_gb: 0.03") !=
        std::string::npos);
  config.enabled = false;
  CHECK(warnings_of_growth(config).empty());
}
