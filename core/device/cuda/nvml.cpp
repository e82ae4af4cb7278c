// Types and numbers of NVML's ABI, from its API reference; no NVML header is needed.

#include "core/device/cuda/nvml.h"

#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include <dlfcn.h>

#include "core/device/cuda/xid.h"

namespace nrl::cuda {
namespace {

using NvmlReturn = int;  // 0: success
using Handle = void*;
struct MemoryInfo {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned gpu, memory;  // percent
};
constexpr unsigned temperature_gpu = 0, clock_sm = 1, clock_memory = 2, uncorrected = 1, volatile_counter = 0;

struct Event {
  Handle device;
  unsigned long long type, xid;
  unsigned gpu_instance, compute_instance;
};
constexpr unsigned long long double_bit_event = 0x2, xid_event = 0x8;
constexpr NvmlReturn timed_out = 10, device_lost = 15;

constexpr std::pair<unsigned long long, const char*> reasons[] = {
    {0x2, "the clocks that were set for applications"},
    {0x4, "power"},
    {0x8, "a slowdown by the hardware"},
    {0x20, "temperature"},
    {0x40, "temperature, by the hardware"},
    {0x80, "the power brake"},
};

class Library final : public Nvml {
 public:
  explicit Library(void* library) : library_(library) {
    load(init_, "nvmlInit_v2");
    load(shutdown_, "nvmlShutdown");
    load(driver_, "nvmlSystemGetDriverVersion");
    load(by_uuid_, "nvmlDeviceGetHandleByUUID");
    load(memory_, "nvmlDeviceGetMemoryInfo");
    load(power_, "nvmlDeviceGetPowerUsage");
    load(power_limit_, "nvmlDeviceGetEnforcedPowerLimit");
    load(clock_, "nvmlDeviceGetClockInfo");
    load(clock_limit_, "nvmlDeviceGetMaxClockInfo");
    load(temperature_, "nvmlDeviceGetTemperature");
    load(utilization_, "nvmlDeviceGetUtilizationRates");
    load(energy_, "nvmlDeviceGetTotalEnergyConsumption");
    load(ecc_, "nvmlDeviceGetTotalEccErrors");
    load(throttle_, "nvmlDeviceGetCurrentClocksThrottleReasons");
    load(remapped_, "nvmlDeviceGetRemappedRows");
    load(create_set_, "nvmlEventSetCreate");
    load(free_set_, "nvmlEventSetFree");
    load(register_, "nvmlDeviceRegisterEvents");
    load(wait_, "nvmlEventSetWait_v2");
    started_ = init_ && init_() == 0;
  }
  ~Library() override {
    if (set_ && free_set_) free_set_(set_);
    if (started_ && shutdown_) shutdown_();
    dlclose(library_);
  }
  bool started() const { return started_; }

  std::string driver_version() const override {
    char text[96] = "";
    if (!driver_ || driver_(text, sizeof text) != 0) return "";
    return text;
  }

  std::optional<DeviceState> state(const std::string& uuid) const override {
    Handle device = nullptr;
    if (!by_uuid_ || by_uuid_(uuid.c_str(), &device) != 0) return {};
    DeviceState s;
    if (MemoryInfo m{}; memory_ && memory_(device, &m) == 0) {
      s.memory_used = m.used;
      s.memory = m.total;
    }
    if (Utilization u{}; utilization_ && utilization_(device, &u) == 0) s.utilization = u.gpu * 1e-2;
    if (unsigned v = 0; power_ && power_(device, &v) == 0) s.power = v * 1e-3;
    if (unsigned v = 0; power_limit_ && power_limit_(device, &v) == 0) s.power_limit = v * 1e-3;
    if (unsigned v = 0; clock_ && clock_(device, clock_sm, &v) == 0) s.clock = static_cast<int>(v);
    if (unsigned v = 0; clock_limit_ && clock_limit_(device, clock_sm, &v) == 0)
      s.clock_limit = static_cast<int>(v);
    if (unsigned v = 0; clock_ && clock_(device, clock_memory, &v) == 0) s.memory_clock = static_cast<int>(v);
    if (unsigned long long v = 0; energy_ && energy_(device, &v) == 0)
      s.energy = static_cast<double>(v) * 1e-3;
    if (unsigned long long v = 0; ecc_ && ecc_(device, uncorrected, volatile_counter, &v) == 0)
      s.ecc_errors = v;
    if (unsigned v = 0; temperature_ && temperature_(device, temperature_gpu, &v) == 0)
      s.temperature = static_cast<int>(v);
    if (unsigned long long bits = 0; throttle_ && throttle_(device, &bits) == 0)
      for (const auto& [bit, name] : reasons)
        if (bits & bit) s.throttled.emplace_back(name);
    unsigned corrected = 0, uncorrected_rows = 0, pending = 0, failed = 0;
    if (remapped_ && remapped_(device, &corrected, &uncorrected_rows, &pending, &failed) == 0) {
      s.remap_pending = pending != 0;
      s.remap_failed = failed != 0;
    }
    return s;
  }

  bool watch(const std::string& uuid) override {
    Handle device = nullptr;
    if (!create_set_ || !register_ || !wait_ || !by_uuid_ || by_uuid_(uuid.c_str(), &device) != 0)
      return false;
    if (!set_ && create_set_(&set_) != 0) return false;
    return register_(device, xid_event | double_bit_event, set_) == 0;
  }

  std::optional<int> wait_for_error(int milliseconds) override {
    Event event{};
    const NvmlReturn result = set_ ? wait_(set_, &event, static_cast<unsigned>(milliseconds)) : timed_out;
    if (result == 0) return event.type == double_bit_event ? xid_double_bit : static_cast<int>(event.xid);
    if (result == device_lost) return xid_lost;
    // Another failure returns at once: the caller must not ask again and again.
    if (result != timed_out) std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    return std::nullopt;
  }

 private:
  template <class F>
  void load(F*& function, const char* name) {
    function = reinterpret_cast<F*>(dlsym(library_, name));
  }

  void* library_;
  bool started_ = false;
  NvmlReturn (*init_)() = nullptr;
  NvmlReturn (*shutdown_)() = nullptr;
  NvmlReturn (*driver_)(char*, unsigned) = nullptr;
  NvmlReturn (*by_uuid_)(const char*, Handle*) = nullptr;
  NvmlReturn (*memory_)(Handle, MemoryInfo*) = nullptr;
  NvmlReturn (*power_)(Handle, unsigned*) = nullptr;
  NvmlReturn (*power_limit_)(Handle, unsigned*) = nullptr;
  NvmlReturn (*clock_)(Handle, unsigned, unsigned*) = nullptr;
  NvmlReturn (*clock_limit_)(Handle, unsigned, unsigned*) = nullptr;
  NvmlReturn (*temperature_)(Handle, unsigned, unsigned*) = nullptr;
  NvmlReturn (*utilization_)(Handle, Utilization*) = nullptr;
  NvmlReturn (*energy_)(Handle, unsigned long long*) = nullptr;
  NvmlReturn (*ecc_)(Handle, unsigned, unsigned, unsigned long long*) = nullptr;
  NvmlReturn (*throttle_)(Handle, unsigned long long*) = nullptr;
  NvmlReturn (*remapped_)(Handle, unsigned*, unsigned*, unsigned*, unsigned*) = nullptr;
  NvmlReturn (*create_set_)(Handle*) = nullptr;
  NvmlReturn (*free_set_)(Handle) = nullptr;
  NvmlReturn (*register_)(Handle, unsigned long long, Handle) = nullptr;
  NvmlReturn (*wait_)(Handle, Event*, unsigned) = nullptr;
  Handle set_ = nullptr;
};

}  // namespace

std::unique_ptr<Nvml> open_nvml(const char* library) {
  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!loaded) return nullptr;
  auto nvml = std::make_unique<Library>(loaded);
  if (!nvml->started()) return nullptr;
  return nvml;
}

std::string uuid_text(const char* bytes) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char digits[4];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(bytes[i]));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits;
  }
  return text;
}

}  // namespace nrl::cuda
