#pragma once
// Clock and power of the device that is measured, for profiles: a GPU's from NVML, a CPU's clock from cpufreq
// or /proc/cpuinfo.

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace nrl::cuda {
class Nvml;
}

namespace nrl::bench {

/// Absent: the machine does not tell.
struct Reading {
  std::optional<double> clock_mhz;  ///< GPU: of the multiprocessors; CPU: mean of the CPUs of this process
  std::optional<double> power_w;    ///< GPU only
};

class Sensor {
 public:
  /// `uuid`: of a GPU; empty: the CPU. `root`: before /sys and /proc, for tests.
  explicit Sensor(std::string uuid, std::string root = "", const char* nvml = "libnvidia-ml.so.1");
  ~Sensor();
  Sensor(const Sensor&) = delete;
  Sensor& operator=(const Sensor&) = delete;

  Reading read() const;
  /// The version of the GPU's driver; empty if it is not known.
  std::string driver() const;

 private:
  std::string uuid_, root_;
  std::unique_ptr<cuda::Nvml> nvml_;
};

}  // namespace nrl::bench
