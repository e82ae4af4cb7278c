// A library with NVML's ABI and one device, "GPU-fake". It knows no clock limit. Of the error whose number is
// in the environment (FAKE_NVML_XID) it tells once; "lost": the device is lost.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {
int started = 0;
int device = 0, events = 0;
bool watched = false;
}  // namespace

extern "C" {
int nvmlInit_v2() {
  ++started;
  return 0;
}
int nvmlShutdown() {
  --started;
  return 0;
}
int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::snprintf(text, size, "580.1");
  return started == 1 ? 0 : 1;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  *handle = &device;
  return std::strcmp(uuid, "GPU-fake") == 0 ? 0 : 6;
}
int nvmlDeviceGetMemoryInfo(void* handle, unsigned long long* total_free_used) {
  total_free_used[0] = 100;
  total_free_used[1] = 60;
  total_free_used[2] = 40;
  return handle == &device ? 0 : 1;
}
int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = 123400;
  return 0;
}
int nvmlDeviceGetClockInfo(void*, unsigned type, unsigned* mhz) {
  *mhz = type == 1 ? 1980 : type == 2 ? 2619 : 1;
  return 0;
}
int nvmlDeviceGetUtilizationRates(void* handle, unsigned* gpu_memory) {
  gpu_memory[0] = 97;
  gpu_memory[1] = 31;
  return handle == &device ? 0 : 1;
}
int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* millijoules) {
  *millijoules = 5500;
  return 0;
}
int nvmlDeviceGetTotalEccErrors(void*, unsigned type, unsigned counter, unsigned long long* count) {
  *count = type == 1 && counter == 0 ? 2 : 77;
  return 0;
}
int nvmlDeviceGetMaxClockInfo(void*, unsigned, unsigned*) {
  return 3;  // not supported
}
int nvmlDeviceGetTemperature(void*, unsigned sensor, unsigned* degrees) {
  *degrees = 41 + sensor;
  return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* bits) {
  *bits = 0x1 | 0x4 | 0x20;  // idle, power, temperature
  return 0;
}
int nvmlDeviceGetRemappedRows(void*, unsigned* corrected, unsigned* uncorrected, unsigned* pending,
                              unsigned* failed) {
  *corrected = 3;
  *uncorrected = 1;
  *pending = 1;
  *failed = 0;
  return 0;
}
int nvmlEventSetCreate(void** set) {
  *set = &events;
  return 0;
}
int nvmlEventSetFree(void* set) {
  return set == &events ? 0 : 1;
}
int nvmlDeviceRegisterEvents(void* handle, unsigned long long types, void* set) {
  watched = handle == &device && set == &events && types == (0x8 | 0x2);
  return watched ? 0 : 1;
}
int nvmlEventSetWait_v2(void* set, void* event, unsigned milliseconds) {
  struct Event {
    void* device;
    unsigned long long type, data;
    unsigned instances[2];
  };
  if (set != &events || !watched) return 2;
  const char* text = std::getenv("FAKE_NVML_XID");
  if (!text) {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    return 10;
  }
  const bool lost = std::strcmp(text, "lost") == 0;
  const auto xid = static_cast<unsigned long long>(std::atoi(text));
  const Event told{&device, xid == 48 ? 0x2u : 0x8u, xid == 48 ? 0 : xid, {0, 0}};
  std::memcpy(event, &told, sizeof told);
  unsetenv("FAKE_NVML_XID");
  return lost ? 15 : 0;
}
}
