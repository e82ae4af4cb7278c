#pragma once
// Device state from the driver's management library (libnvidia-ml). It is loaded at run time: where it is
// absent or does not answer, the value is absent; nothing here is an error.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace nrl::cuda {

/// The state of a device now. Absent: not reported by this device or driver.
struct DeviceState {
  std::optional<uint64_t> memory_used;  ///< bytes, by all processes
  std::optional<uint64_t> memory;       ///< bytes in all
  std::optional<double> utilization;    ///< fraction of the last sample period in which a kernel ran
  std::optional<double> power;          ///< W
  std::optional<double> power_limit;    ///< W
  std::optional<int> clock;             ///< MHz, of the multiprocessors
  std::optional<int> clock_limit;       ///< MHz
  std::optional<int> memory_clock;      ///< MHz
  std::optional<int> temperature;       ///< degrees Celsius
  std::optional<double> energy;         ///< J, since the driver was loaded
  std::optional<uint64_t> ecc_errors;   ///< uncorrected ones since the driver was loaded; absent without ECC
  bool remap_pending = false;           ///< rows of memory are remapped at the next reset
  bool remap_failed = false;            ///< a row of memory cannot be remapped: the device is to be exchanged
  /// Why the clock is below its limit under load: "power", "temperature", ...; empty: not throttled.
  std::vector<std::string> throttled;
};

class Nvml {
 public:
  virtual ~Nvml() = default;
  /// "580.95.05"; empty when the library does not report it.
  virtual std::string driver_version() const = 0;
  /// `uuid` as in DeviceInfo. Nothing when the library does not know the device.
  virtual std::optional<DeviceState> state(const std::string& uuid) const = 0;
  /// Lets wait_for_error() see the errors of a device from now on. False where the driver does not tell them.
  virtual bool watch(const std::string& uuid) = 0;
  /// The number of the next error (xid.h) of a watched device; an uncorrectable memory error and a lost
  /// device have theirs. Nothing after so many milliseconds.
  virtual std::optional<int> wait_for_error(int milliseconds) = 0;
};

/// Null when there is no such library, or it does not start.
std::unique_ptr<Nvml> open_nvml(const char* library = "libnvidia-ml.so.1");

/// "GPU-xxxxxxxx-xxxx-..." from the 16 bytes of a device's id.
std::string uuid_text(const char* bytes);

}  // namespace nrl::cuda
