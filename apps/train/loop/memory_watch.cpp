#include "apps/train/loop/memory_watch.h"

#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include "apps/monitor/timers.h"
#include "core/device/cpu/memory.h"

namespace nrl::train {
namespace {

/// Open files of this process by kind. Names that end while they are read count as other.
monitor::MemorySample open_files(int64_t step) {
  enum Kind { regular, socket, pipe, memory, device, other, kinds };
  constexpr const char* names[] = {"files", "sockets", "pipes", "shared memory", "devices", "other handles"};
  int64_t counts[kinds] = {};
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    const Kind kind = target.starts_with("socket:")     ? socket
                      : target.starts_with("pipe:")     ? pipe
                      : target.starts_with("/dev/shm/") ? memory
                      : target.starts_with("/dev/")     ? device
                      : target.starts_with("/")         ? regular
                                                        : other;
    ++counts[kind];
  }
  monitor::MemorySample out{.step = step};
  for (int k = 0; k < kinds; ++k) {
    out.total += counts[k];
    out.parts.push_back({names[k], counts[k]});
  }
  return out;
}

int64_t threads() {
  std::error_code ignored;
  const std::filesystem::directory_iterator tasks("/proc/self/task", ignored);
  return std::distance(begin(tasks), end(tasks));
}

}  // namespace

MemoryWatch::MemoryWatch(const MonitoringConfig& config, int64_t arena, device::Runtime* device)
    : enabled_(config.enabled),
      arena_(arena),
      device_(device),
      host_("the resident memory of this process", config.memory_leak),
      gpu_("the memory in use on the GPU", config.memory_leak) {}

std::vector<monitor::Leak> MemoryWatch::after_step(int64_t step) {
  std::vector<monitor::Leak> leaks;
  if (!enabled_) return leaks;
  const double now = monitor::Timers::steady_seconds();
  if (step <= 2 || now < next_) return leaks;
  next_ = now + 0.2;
  const auto add = [&](monitor::LeakDetector& detector, const monitor::MemorySample& sample) {
    if (auto leak = detector.add(sample)) leaks.push_back(std::move(*leak));
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
  add(files_, open_files(step));
  const int64_t running = threads();
  add(threads_, {.step = step, .total = running, .parts = {{"threads", running}}});
  if (device_) {
    const auto used = static_cast<int64_t>(device_->properties().memory - device_->free_memory());
    add(gpu_, {.step = step, .total = used, .parts = {{"memory of libraries and other processes", used}}});
  }
  return leaks;
}

}  // namespace nrl::train
