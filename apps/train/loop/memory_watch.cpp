#include "apps/train/loop/memory_watch.h"

#include "apps/monitor/timers.h"
#include "core/device/cpu/memory.h"

namespace nrl::train {

MemoryWatch::MemoryWatch(const MonitoringConfig& config, int64_t arena, device::Runtime* device)
    : enabled_(config.enabled),
      arena_(arena),
      device_(device),
      host_("the resident memory of this process", config.memory_leak),
      gpu_("the memory in use on the GPU", config.memory_leak) {}

std::vector<std::string> MemoryWatch::after_step(int64_t step) {
  std::vector<std::string> warnings;
  if (!enabled_) return warnings;
  const double now = monitor::Timers::steady_seconds();
  if (step <= 2 || now < next_) return warnings;
  next_ = now + 0.2;
  const auto add = [&](monitor::LeakDetector& detector, const monitor::MemorySample& sample) {
    if (auto warning = detector.add(sample)) warnings.push_back(std::move(*warning));
  };
  const cpu::ResidentMemory host = cpu::resident_memory();
  add(host_, {.step = step,
              .total = host.anonymous + host.files + host.shared,
              .parts = {{"the heap in use (malloc)", host.heap_used},
                        {"the free memory of the heap", host.heap_free},
                        {"anonymous mappings besides arena and heap",
                         host.anonymous - arena_ - host.heap_used - host.heap_free},
                        {"mapped files", host.files},
                        {"shared memory", host.shared}}});
  if (device_) {
    const auto used = static_cast<int64_t>(device_->properties().memory - device_->free_memory());
    add(gpu_, {.step = step, .total = used, .parts = {{"memory of libraries and other processes", used}}});
  }
  return warnings;
}

}  // namespace nrl::train
