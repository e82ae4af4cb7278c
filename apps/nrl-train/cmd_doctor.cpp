// nrl-train doctor: what this build and this machine can do.

#include <unistd.h>

#include "apps/nrl-train/commands.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/device/cpu/features.h"
#include "core/ops/linear/peak.h"
#include "parallel/comm/world.h"

namespace nrl::app {

int run_doctor() {
  const int threads = cpu::available_cpus();
  log::info("nrl-train {}", NRL_VERSION);
  log::info("processor    {}", cpu::processor_name());
  log::info("kernels      {} ({} cpus usable by this process)", name_of(cpu::best_isa()), threads);
  log::info("memory       {}", human_bytes(static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                                           static_cast<uint64_t>(sysconf(_SC_PAGESIZE))));
  log::info("fp32 peak    {:.0f} GFLOP/s measured with register FMAs, {:.0f} in matrix products",
            ops::measure_fma_peak(threads), ops::measure_gemm_peak(threads));
  log::info("devices      cpu; CUDA is not part of this build");
  log::info("launcher     {}", comm::launched_with_peers() ? "several processes were started"
                                                           : "this process alone (no MPI needed)");
  return 0;
}

}  // namespace nrl::app
