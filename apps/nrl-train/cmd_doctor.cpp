// nrl-train doctor: capabilities of this build and this machine.

#include <memory>
#include <optional>
#include <string>

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <spdlog/fmt/ranges.h>

#include "apps/diagnosis/stale_segments.h"
#include "apps/launch/health.h"
#include "apps/nrl-train/commands.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/device/cpu/features.h"
#include "core/device/cuda/devices.h"
#include "core/device/cuda/nvml.h"
#include "core/ops/cpu_choice.h"
#include "core/ops/libraries.h"
#include "core/ops/peak.h"
#include "parallel/comm/device_options.h"
#include "parallel/comm/world/world.h"

namespace nrl::app {

namespace {

/// The state reported by the driver: "1.2 GiB in use, 75 of 700 W, ...".
std::string state_text(const cuda::DeviceState& s) {
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (s.memory_used) add(human_bytes(*s.memory_used) + " in use");
  if (s.power)
    add(s.power_limit ? fmt::format("{:.0f} of {:.0f} W", *s.power, *s.power_limit)
                      : fmt::format("{:.0f} W", *s.power));
  if (s.clock)
    add(s.clock_limit ? fmt::format("{} of {} MHz", *s.clock, *s.clock_limit)
                      : fmt::format("{} MHz", *s.clock));
  if (s.temperature) add(fmt::format("{} C", *s.temperature));
  if (!s.throttled.empty()) add(fmt::format("throttled by {}", fmt::join(s.throttled, " and ")));
  return text;
}

void print_devices() {
  const cuda::Status cuda = cuda::query();
  const std::unique_ptr<cuda::Nvml> nvml = cuda.driver.empty() ? nullptr : cuda::open_nvml();
  log::info("cuda         {}", cuda.built ? fmt::format("built with toolkit {} for compute capability {}",
                                                        cuda.toolkit, cuda.architectures)
                                          : "not in this build");
  if (!cuda.driver.empty())
    log::info("driver       {}supports CUDA {}",
              nvml && !nvml->driver_version().empty() ? nvml->driver_version() + ", " : "", cuda.driver);
  for (size_t i = 0; i < cuda.devices.size(); ++i) {
    const cuda::DeviceInfo& d = cuda.devices[i];
    log::info("device {:<5} {}, {}, compute capability {}.{}, {} multiprocessors{}{}{}", i, d.name,
              human_bytes(d.memory), d.major, d.minor, d.multiprocessors,
              d.memory_bandwidth > 0
                  ? fmt::format(", {:.1f} TB/s (memory clock x bus width)", d.memory_bandwidth * 1e-12)
                  : "",
              d.ecc ? ", ECC" : "", d.mig ? ", a MIG slice" : "");
    if (const auto state = nvml ? nvml->state(d.uuid) : std::nullopt)
      log::info("             {}; {}", d.uuid, state_text(*state));
    if (!d.fits)
      log::info("             not usable: this build has no kernels for compute capability {}.{}", d.major,
                d.minor);
    if (d.prohibited) log::info("             not usable: compute mode PROHIBITED");
    if (d.exclusive) log::info("             exclusive compute mode: ranks cannot share this device");
  }
  for (const std::string& library : ops::cuda_library_versions()) log::info("library      {}", library);
  const comm::NcclSupport nccl = comm::nccl_support();
  log::info("nccl         {}",
            !nccl.built ? std::string("not in this build; ranks communicate through host memory")
                        : fmt::format("{}.{}.{}{}", nccl.version / 10000, nccl.version / 100 % 100,
                                      nccl.version % 100,
                                      nccl.multi_rank_gpu ? ", several ranks may share a GPU" : ""));
  log::info("training     {}", cuda.problem.empty()
                                   ? "device: auto and device: cuda train on the GPU"
                                   : "on the CPU; device: cuda is not available: " + cuda.problem);
}

int run_doctor() {
  const int threads = cpu::available_cores();
  log::info("nrl-train {}", NRL_VERSION);
  log::info("processor    {}", cpu::processor_name());
  const ops::CpuChoice& choice = ops::cpu_choice();
  log::info("kernels      {} ({} cores available to this process)", name_of(choice.isa), threads);
  log::info("bf16         {}: {}",
            choice.isa >= cpu::Isa::avx512_bf16 ? "native products" : "storage only, arithmetic in fp32",
            ops::bf16_reason(choice));
  log::info("memory       {}", human_bytes(static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                                           static_cast<uint64_t>(sysconf(_SC_PAGESIZE))));
  log::info("fp32 peak    {:.0f} GFLOP/s in register FMAs, {:.0f} GFLOP/s in matmuls (measured)",
            ops::measure_fma_peak(threads, 0.2), ops::measure_gemm_peak(threads, 0.2));
  print_devices();
  log::info("launcher     {}", comm::launched_with_peers() ? "mpirun or srun with several processes"
                                                           : "none: a single process without MPI");
  return 0;
}

// 69: this host should not be used.
int run_health(bool json) {
  diagnosis::remove_stale_segments();
  const launch::Health health = launch::examine(1);
  if (json) {
    log::info("{}", to_json(health).dump());
  } else {
    for (const std::string& problem : health.problems) log::warn("{}", problem);
    log::info("{}: {}; {} of memory, {} of /dev/shm, {} GPUs, {} exact products", health.host,
              health.problems.empty() ? "healthy" : "should not be used",
              human_bytes(static_cast<uint64_t>(health.memory_bytes)),
              human_bytes(static_cast<uint64_t>(health.shared_bytes)), health.gpus, health.products);
  }
  return static_cast<int>(health.problems.empty() ? Exit::ok : Exit::unavailable);
}

}  // namespace

void add_doctor(CommandLine& line) {
  struct Args {
    bool health = false, json = false;
  };
  const auto args = std::make_shared<Args>();
  CLI::App* c =
      line.add("doctor", "Show the capabilities of this build and this machine",
               "  nrl-train doctor\n"
               "  nrl-train doctor --health --json    a second's examination, as nrl-train launch does it");
  CLI::Option* health =
      c->add_flag("--health", args->health, "Examine memory, /dev/shm, GPUs and arithmetic");
  c->add_flag("--json", args->json, "Print the examination as JSON")->needs(health);
  line.on(c, [args] { return args->health ? run_health(args->json) : run_doctor(); });
}

}  // namespace nrl::app
