// The leak test of a run, on the memory of this process.

#include "apps/train/loop/memory_watch.h"

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include "core/base/text.h"
#include "tests/catch.h"

using namespace nrl;

namespace {

/// What is warned of when 64 MB come into use between two samples.
std::vector<monitor::Leak> warnings_of_growth(const MonitoringConfig& config) {
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
  const monitor::Leak leak = warnings_of_growth(config).front();
  CHECK(leak.text.find("monitoring.memory_leak.step_increase_gb: 0.03") != std::string::npos);
  CHECK(leak.growth > 60'000'000);
  CHECK(leak.growth < monitor::Leak::high);
  config.enabled = false;
  CHECK(warnings_of_growth(config).empty());
}

TEST_CASE("open files and threads that pile up are reported by kind") {
  train::MemoryWatch watch({}, 0, nullptr);
  std::vector<std::string> warnings;
  std::vector<int> open;
  for (int64_t step = 3; step < 14; ++step) {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    open.insert(open.end(), {ends[0], ends[1]});
    for (const monitor::Leak& leak : watch.after_step(step)) {
      warnings.push_back(leak.text);
      CHECK(leak.growth == 0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(210));
  }
  for (const int file : open) ::close(file);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings.front().starts_with(
      "the number of open files grows by 2 per step: pipes grew by 18 in steps"));
}
