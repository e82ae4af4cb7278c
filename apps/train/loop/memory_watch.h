#pragma once
// Samples the memory, open files and threads of a rank after its steps, for the leak detectors.

#include <optional>
#include <string>
#include <vector>

#include "apps/monitor/leak_detector.h"
#include "core/device/runtime.h"

namespace nrl::train {

class MemoryWatch {
 public:
  /// Samples nothing unless `config` is enabled. `arena`: bytes of the engine's host arena; `device`: the
  /// GPU, null on a CPU; must outlive the watch.
  MemoryWatch(const MonitoringConfig& config, int64_t arena, device::Runtime* device);

  /// Call after every step, counted from 1 in this process: the first two, in which the arena becomes
  /// resident, are not sampled. Takes 100 us at most five times a second.
  std::vector<monitor::Leak> after_step(int64_t step);

 private:
  bool enabled_;
  int64_t arena_;
  device::Runtime* device_;
  monitor::LeakDetector host_, gpu_;
  monitor::LeakDetector files_ = monitor::LeakDetector::of_counts("the number of open files");
  monitor::LeakDetector threads_ = monitor::LeakDetector::of_counts("the number of threads");
  double next_ = 0;
};

}  // namespace nrl::train
