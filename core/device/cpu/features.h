#pragma once
// Features of the processor, found by CPUID at run time.

#include <optional>
#include <string>
#include <string_view>

#include "core/base/isa.h"

namespace nrl::cpu {

using nrl::Isa;

/// The best instruction set of this processor (AVX-512 means F, BW, DQ and VL; avx512_amx is AVX512_BF16 and
/// an AMX that may be used). That it multiplies bf16 does not mean that it does so fast: see
/// ops::cpu_choice().
Isa best_isa();

/// AMX tiles of bf16. Its 8 KiB of registers per thread are saved for processes that have asked for it.
struct Amx {
  bool present = false;      ///< CPUID
  std::string problem = {};  ///< why it must not be used although it is present
};
/// Asks the operating system for the permission to use AMX where it is present, once per process. It holds
/// for all threads; a thread's tiles are its own to configure and to release.
const Amx& amx();

/// Model name from /proc/cpuinfo, or the architecture.
std::string processor_name();

/// CPUs in this process's affinity mask.
int available_cpus();

/// OMP_NUM_THREADS: a positive integer, or a list of them ("4,2"), of which the first counts, as in OpenMP.
struct OmpThreads {
  int threads = 0;                          ///< 0: the variable is not set, or not valid
  std::optional<std::string> invalid = {};  ///< its text, if that is no such list, or above max_threads
};
OmpThreads omp_num_threads();

/// Physical cores among them (hwloc): the default number of compute threads, since two threads of one core
/// share its vector units. available_cpus() where hwloc does not know the cores.
int available_cores();

/// Must be called before threads start and before MPI_Init. Where /sys is not mounted, as in many
/// containers, hwloc (ours and Open MPI's) would report that on standard error of every rank; it gets the
/// cores from CPUID then.
void silence_hwloc_without_sysfs();

}  // namespace nrl::cpu
