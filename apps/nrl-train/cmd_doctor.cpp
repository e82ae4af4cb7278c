// nrl-train doctor: what this build and this machine can do.

#include <unistd.h>

#include "apps/nrl-train/commands.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/device/cpu/features.h"
#include "core/device/cuda/devices.h"
#include "core/ops/linear/peak.h"
#include "parallel/comm/world.h"

namespace nrl::app {

int run_doctor() {
  const int threads = cpu::available_cores();
  log::info("nrl-train {}", NRL_VERSION);
  log::info("processor    {}", cpu::processor_name());
  log::info("kernels      {} ({} cores usable by this process)", name_of(cpu::best_isa()), threads);
  log::info("memory       {}", human_bytes(static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                                           static_cast<uint64_t>(sysconf(_SC_PAGESIZE))));
  log::info("fp32 peak    {:.0f} GFLOP/s measured with register FMAs, {:.0f} in matrix products",
            ops::measure_fma_peak(threads), ops::measure_gemm_peak(threads));
  const cuda::Status cuda = cuda::query();
  log::info("cuda         {}{}", cuda.built ? "built with toolkit " + cuda.toolkit : "not in this build",
            cuda.problem.empty() || !cuda.built ? "" : "; " + cuda.problem);
  for (const cuda::DeviceInfo& d : cuda.devices)
    log::info("device       {}, compute capability {}.{}, {}, {} multiprocessors", d.name, d.major, d.minor,
              human_bytes(d.memory), d.multiprocessors);
  log::info("training     on the CPU; there are no CUDA kernels yet");
  log::info("launcher     {}", comm::launched_with_peers() ? "several processes were started"
                                                           : "this process alone (no MPI needed)");
  return 0;
}

}  // namespace nrl::app
