// Clock and power of the measured device, from files and a library that the test provides.

#include "apps/bench/sensor.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <sched.h>

#include "tests/catch.h"
#include "tests/io/io_test_util.h"

namespace nrl::bench {
namespace {

void put(const std::string& root, const std::string& path, const std::string& text) {
  const std::filesystem::path file = root + "/" + path;
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file) << text;
}

/// A CPU that this process may use, and the next one that it may not.
std::pair<int, int> own_and_other() {
  cpu_set_t set;
  CPU_ZERO(&set);
  REQUIRE(sched_getaffinity(0, sizeof set, &set) == 0);
  int own = 0;
  while (!CPU_ISSET(own, &set)) ++own;
  int other = own;
  while (CPU_ISSET(other, &set)) ++other;
  return {own, other};
}

}  // namespace

TEST_CASE("The clock of a CPU is that of the CPUs of this process", "[sensor]") {
  const test::TemporaryDirectory root;
  const auto [own, other] = own_and_other();
  CHECK_FALSE(Sensor("", root.path()).read().clock_mhz);
  put(root.path(), "proc/cpuinfo",
      fmt::format(
          "processor\t: {}\nmodel name\t: x\ncpu MHz\t\t: 2300.500\n\nprocessor\t: {}\ncpu MHz\t\t: 9000\n",
          own, other));
  const Reading read = Sensor("", root.path()).read();
  REQUIRE(read.clock_mhz);
  CHECK(*read.clock_mhz == Approx(2300.5));
  CHECK_FALSE(read.power_w);
  // cpufreq counts first; in kHz.
  put(root.path(), fmt::format("sys/devices/system/cpu/cpu{}/cpufreq/scaling_cur_freq", own), "1800000\n");
  put(root.path(), fmt::format("sys/devices/system/cpu/cpu{}/cpufreq/scaling_cur_freq", other), "900000\n");
  CHECK(*Sensor("", root.path()).read().clock_mhz == Approx(1800));
  CHECK(Sensor("", root.path()).driver().empty());
}

TEST_CASE("Clock and power of a GPU are NVML's", "[sensor]") {
  const Sensor sensor("GPU-fake", "", FAKE_NVML);
  const Reading read = sensor.read();
  REQUIRE(read.clock_mhz);
  CHECK(*read.clock_mhz == 1980);
  REQUIRE(read.power_w);
  CHECK(*read.power_w == Approx(123.4));
  CHECK(sensor.driver() == "580.1");
  const Reading none = Sensor("GPU-other", "", FAKE_NVML).read();
  CHECK_FALSE(none.clock_mhz);
  CHECK_FALSE(none.power_w);
  CHECK_FALSE(Sensor("GPU-fake", "", "no-such-library.so").read().clock_mhz);
}

}  // namespace nrl::bench
