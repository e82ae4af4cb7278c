#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include <unistd.h>

#include <hwloc.h>

#include "core/base/threads.h"
#include "core/device/cpu/features.h"

namespace nrl::cpu {

OmpThreads omp_num_threads() {
  const char* const value = std::getenv("OMP_NUM_THREADS");
  if (value == nullptr) return {};
  const std::string_view all(value);
  OmpThreads out;
  for (size_t begin = 0; begin <= all.size();) {
    const size_t comma = std::min(all.find(',', begin), all.size());
    std::string_view text = all.substr(begin, comma - begin);
    text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
    text.remove_suffix(text.size() - std::min(text.find_last_not_of(" \t") + 1, text.size()));
    int threads = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), threads);
    if (error != std::errc() || end != text.data() + text.size() || threads < 1 || threads > max_threads)
      return {.invalid = std::string(all)};
    if (begin == 0) out.threads = threads;
    begin = comma + 1;
  }
  return out;
}

int available_cores() {
  hwloc_topology_t topology;
  if (hwloc_topology_init(&topology) != 0) return available_cpus();
  int cores = 0;
  // The topology as this process may use it: only what its binding and its container allow.
  hwloc_topology_set_all_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_NONE);
  hwloc_topology_set_type_filter(topology, HWLOC_OBJ_CORE, HWLOC_TYPE_FILTER_KEEP_ALL);
  if (hwloc_topology_load(topology) == 0) {
    hwloc_bitmap_t mine = hwloc_bitmap_alloc();
    if (mine && hwloc_get_cpubind(topology, mine, HWLOC_CPUBIND_PROCESS) == 0)
      for (hwloc_obj_t core = nullptr;
           (core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, core)) != nullptr;)
        cores += hwloc_bitmap_intersects(core->cpuset, mine) ? 1 : 0;
    hwloc_bitmap_free(mine);
  }
  hwloc_topology_destroy(topology);
  return cores > 0 ? cores : std::max(available_cpus(), 1);
}

void silence_hwloc_without_sysfs() {
  if (access("/sys/devices/system/cpu", F_OK) != 0) setenv("HWLOC_HIDE_ERRORS", "2", /*overwrite=*/0);
}

}  // namespace nrl::cpu
