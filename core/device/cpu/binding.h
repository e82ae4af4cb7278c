#pragma once
// The CPUs that this process's threads may use.

#include <string_view>
#include <vector>

namespace nrl::cpu {

/// The CPUs of the calling thread's affinity mask.
std::vector<int> allowed_cpus();

/// The CPUs of one of `ranks` ranks of this node for kernels.cpu_binding other than "none". "auto": an equal
/// share of the cores in `allowed`, with all their CPUs there; all of `allowed` if that is a share already,
/// which the launcher has set. A list: the rank's part of it. Fails with Exit::config where a rank would get
/// none, or a CPU is not in `allowed`.
std::vector<int> cpus_of_rank(std::string_view binding, const std::vector<int>& allowed, int rank, int ranks);

/// Binds the calling thread, and all threads that it starts, to these CPUs. To be called before other threads
/// start.
void bind_to(const std::vector<int>& cpus);

/// CPUs of the cores that have some in `allowed`, by core; each CPU is a core where hwloc knows none.
std::vector<std::vector<int>> cores_of(const std::vector<int>& allowed);

}  // namespace nrl::cpu
