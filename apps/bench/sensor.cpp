#include "apps/bench/sensor.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <numeric>
#include <utility>

#include <sched.h>

#include <spdlog/fmt/fmt.h>

#include "core/device/cuda/nvml.h"

namespace nrl::bench {
namespace {

std::vector<int> own_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> out;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return out;
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(i, &set)) out.push_back(i);
  return out;
}

/// "cpu MHz : 2300.000" of each processor, by its number.
std::vector<std::pair<int, double>> clocks_of_cpuinfo(const std::string& path) {
  std::vector<std::pair<int, double>> out;
  std::ifstream file(path);
  int processor = -1;
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || colon + 2 > line.size()) continue;
    const char *const begin = line.data() + colon + 2, *const end = line.data() + line.size();
    double value = 0;
    if (line.starts_with("processor")) {
      if (std::from_chars(begin, end, processor).ec != std::errc()) processor = -1;
    } else if (line.starts_with("cpu MHz") && std::from_chars(begin, end, value).ec == std::errc()) {
      out.emplace_back(processor, value);
    }
  }
  return out;
}

std::optional<double> cpu_clock(const std::string& root) {
  const std::vector<int> cpus = own_cpus();
  std::vector<double> clocks;
  for (const int cpu : cpus) {
    std::ifstream file(fmt::format("{}/sys/devices/system/cpu/cpu{}/cpufreq/scaling_cur_freq", root, cpu));
    if (double khz = 0; file >> khz && khz > 0) clocks.push_back(khz * 1e-3);
  }
  if (clocks.empty())
    for (const auto& [cpu, mhz] : clocks_of_cpuinfo(root + "/proc/cpuinfo"))
      if (mhz > 0 && std::find(cpus.begin(), cpus.end(), cpu) != cpus.end()) clocks.push_back(mhz);
  if (clocks.empty()) return std::nullopt;
  return std::accumulate(clocks.begin(), clocks.end(), 0.0) / static_cast<double>(clocks.size());
}

}  // namespace

Sensor::Sensor(std::string uuid, std::string root, const char* nvml)
    : uuid_(std::move(uuid)), root_(std::move(root)) {
  if (!uuid_.empty()) nvml_ = cuda::open_nvml(nvml);
}
Sensor::~Sensor() = default;

Reading Sensor::read() const {
  Reading out;
  if (uuid_.empty()) {
    out.clock_mhz = cpu_clock(root_);
  } else if (const auto state = nvml_ ? nvml_->state(uuid_) : std::nullopt) {
    if (state->clock && *state->clock > 0) out.clock_mhz = *state->clock;
    if (state->power && *state->power > 0) out.power_w = state->power;
  }
  return out;
}

std::string Sensor::driver() const {
  return nvml_ ? nvml_->driver_version() : "";
}

}  // namespace nrl::bench
