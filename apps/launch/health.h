#pragma once
// A short examination of a host before its node is used again: nrl-train doctor --health.

#include <string>
#include <vector>

#include "core/io/json.h"

namespace nrl::launch {

struct Health {
  std::string host;
  std::vector<std::string> problems;  ///< empty: healthy
  int64_t memory_bytes = 0;           ///< available
  int64_t shared_bytes = 0;           ///< room in /dev/shm
  int gpus = 0;
  int64_t products = 0;  ///< matrices multiplied exactly
};

/// Files and libraries that the facts come from, for tests.
struct HealthSources {
  std::string root = {};  ///< of /sys
  const char* nvml = "libnvidia-ml.so.1";
  std::vector<std::string> gpus = {};  ///< uuids in place of those that CUDA shows; empty: those
};

/// Examines this host: memory and its uncorrected errors (EDAC), shared memory, GPUs and theirs (NVML), and
/// arithmetic with known results on all cores for `seconds`. A fact that the system does not show is no
/// problem.
Health examine(double seconds, const HealthSources& sources = {});
JsonValue to_json(const Health& health);

/// The problem that the output of `doctor --health --json` states: the first one of its JSON line, or that
/// there is no such line. Empty: the host is healthy. The output is not trusted.
std::string problem_in(const std::string& output);

}  // namespace nrl::launch
