#include "core/device/cpu/threads.h"

#include <cstdlib>
#include <latch>
#include <vector>

#include <unistd.h>

#include <omp.h>

#include "core/base/inherited_signals.h"
#include "core/base/threads.h"
#include "core/device/cpu/binding.h"

namespace nrl::cpu {

namespace {

// Rounds of GCC's OpenMP, each one pause instruction: enough for the gaps between the parallel regions of a
// step. Its default of 300,000 is more than 10 ms of a core that other threads could use.
constexpr const char* spin_rounds = "3000";

/// With OMP_PLACES, OMP_PROC_BIND or GOMP_CPU_AFFINITY GCC's OpenMP binds the first thread to the first place
/// before main. Gives this thread the CPUs of all places back: cores are counted by its affinity mask, and
/// exec() and new threads inherit the mask. OpenMP's other threads stay bound to their places.
void leave_first_place() {
  std::vector<int> cpus;
  for (int place = 0; place < omp_get_num_places(); ++place) {
    std::vector<int> more(static_cast<size_t>(omp_get_place_num_procs(place)));
    omp_get_place_proc_ids(place, more.data());
    cpus.insert(cpus.end(), more.begin(), more.end());
  }
  if (!cpus.empty()) bind_to(cpus);
}

}  // namespace

void prepare_openmp(char** argv) {
  leave_first_place();
  for (const char* name : {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
    if (std::getenv(name)) return;
  if (setenv("GOMP_SPINCOUNT", spin_rounds, 1) != 0) return;
  // By its name, so that process lists do not show "exe".
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
  if (length <= 0) return;
  path[length] = '\0';
  restore_ignored_hangup();
  execv(path, argv);
  // Where that fails (the file was replaced, no /proc) the program continues with OpenMP's default.
}

void use_threads(int threads) {
  {
    // Keep all probes alive at once: the limit counts live threads.
    std::latch release(1);
    std::vector<std::thread> probes;
    const auto join = [&] {
      release.count_down();
      for (std::thread& t : probes) t.join();
    };
    try {
      for (int i = 1; i < threads; ++i) probes.push_back(start_thread([&] { release.wait(); }));
    } catch (...) {
      join();
      throw;
    }
    join();
  }
  omp_set_num_threads(threads);
#pragma omp parallel num_threads(threads)
  {}
}

}  // namespace nrl::cpu
