#include "core/device/cpu/binding.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sched.h>
#include <unistd.h>

#include <hwloc.h>

#include "core/base/cpu_list.h"
#include "core/base/error.h"

namespace nrl::cpu {
namespace {

/// A mask of as many CPUs as the kernel may know, which a cpu_set_t does not hold on large machines.
class Mask {
 public:
  explicit Mask(int cpus) : size_(CPU_ALLOC_SIZE(cpus)), set_(CPU_ALLOC(cpus)) {
    if (!set_) fail(Exit::out_of_memory, "kernels.cpu_binding: no memory for a mask of {} CPUs", cpus);
    CPU_ZERO_S(size_, set_);
  }
  ~Mask() { CPU_FREE(set_); }
  Mask(const Mask&) = delete;
  Mask& operator=(const Mask&) = delete;
  size_t size() const { return size_; }
  cpu_set_t* get() { return set_; }

 private:
  size_t size_;
  cpu_set_t* set_;
};

constexpr int most_cpus = 1 << 14;

}  // namespace

std::vector<int> allowed_cpus() {
  Mask mask(most_cpus);
  std::vector<int> out;
  if (sched_getaffinity(0, mask.size(), mask.get()) != 0) return out;
  for (int cpu = 0; cpu < most_cpus; ++cpu)
    if (CPU_ISSET_S(static_cast<size_t>(cpu), mask.size(), mask.get())) out.push_back(cpu);
  return out;
}

void bind_to(const std::vector<int>& cpus) {
  Mask mask(most_cpus);
  for (const int cpu : cpus)
    if (cpu < most_cpus) CPU_SET_S(static_cast<size_t>(cpu), mask.size(), mask.get());
  if (sched_setaffinity(0, mask.size(), mask.get()) != 0)
    fail(Exit::config, "kernels.cpu_binding: the system refuses CPUs {}: {}", cpu_list_text(cpus),
         std::strerror(errno));
}

std::vector<std::vector<int>> cores_of(const std::vector<int>& allowed) {
  std::vector<std::vector<int>> cores;
  std::vector<int> left = allowed;
  hwloc_topology_t topology;
  if (hwloc_topology_init(&topology) == 0) {
    hwloc_topology_set_all_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_NONE);
    hwloc_topology_set_type_filter(topology, HWLOC_OBJ_CORE, HWLOC_TYPE_FILTER_KEEP_ALL);
    if (hwloc_topology_load(topology) == 0)
      for (hwloc_obj_t core = nullptr;
           (core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, core)) != nullptr;) {
        std::vector<int> cpus;
        for (const int cpu : allowed)
          if (hwloc_bitmap_isset(core->cpuset, static_cast<unsigned>(cpu))) cpus.push_back(cpu);
        for (const int cpu : cpus) std::erase(left, cpu);
        if (!cpus.empty()) cores.push_back(std::move(cpus));
      }
    hwloc_topology_destroy(topology);
  }
  for (const int cpu : left) cores.push_back({cpu});
  return cores;
}

std::vector<int> cpus_of_rank(std::string_view binding, const std::vector<int>& allowed, int rank,
                              int ranks) {
  const auto share = [&](size_t all) {
    return std::pair(all * static_cast<size_t>(rank) / static_cast<size_t>(ranks),
                     all * static_cast<size_t>(rank + 1) / static_cast<size_t>(ranks));
  };
  std::vector<int> out;
  if (binding == "auto") {
    // As for the number of threads: a mask that is a rank's share of the machine was set for this rank.
    if (static_cast<long>(allowed.size()) * ranks <= sysconf(_SC_NPROCESSORS_ONLN)) return allowed;
    const std::vector<std::vector<int>> cores = cores_of(allowed);
    const auto [begin, end] = share(cores.size());
    for (size_t i = begin; i < end; ++i) out.insert(out.end(), cores[i].begin(), cores[i].end());
    std::sort(out.begin(), out.end());
    if (out.empty())
      fail(Exit::config,
           "kernels.cpu_binding: auto: {} cores for {} ranks of this node. Fix: kernels.cpu_binding: none",
           cores.size(), ranks);
    return out;
  }
  const std::vector<int> cpus = parse_cpu_list(binding).value();
  const auto [begin, end] = share(cpus.size());
  out.assign(cpus.begin() + static_cast<long>(begin), cpus.begin() + static_cast<long>(end));
  if (out.empty())
    fail(Exit::config, "kernels.cpu_binding: {}: {} CPUs for {} ranks of this node. Fix: name more CPUs",
         binding, cpus.size(), ranks);
  for (const int cpu : out)
    if (std::find(allowed.begin(), allowed.end(), cpu) == allowed.end())
      fail(Exit::config, "kernels.cpu_binding: {}: this process may not use CPU {}; it may use {}. Fix: {}",
           binding, cpu, cpu_list_text(allowed), "name CPUs among these, or let the launcher bind no ranks");
  return out;
}

}  // namespace nrl::cpu
