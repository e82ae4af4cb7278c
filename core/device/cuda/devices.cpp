#include "core/device/cuda/devices.h"

#include <cstdlib>
#include <string>

#include <cuda_runtime_api.h>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/device/cuda/architectures.h"
#include "core/device/cuda/nvml.h"

namespace nrl::cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string why_none(cudaError_t error, const Status& status) {
  switch (error) {
    case cudaErrorInsufficientDriver:
      return status.driver.empty()
                 ? "there is no NVIDIA driver on this machine"
                 : fmt::format(
                       "the NVIDIA driver supports CUDA {}, this build needs {}; update the driver, or build "
                       "with an older toolkit",
                       status.driver, status.toolkit);
    case cudaErrorNoDevice:
      return "the NVIDIA driver shows no device; is CUDA_VISIBLE_DEVICES empty, or did the scheduler give "
             "none?";
    default:
      return fmt::format("the NVIDIA driver does not start: {} ({})", cudaGetErrorString(error),
                         cudaGetErrorName(error));
  }
}

/// Every stream gets a hardware queue of its own. With fewer, a kernel of NCCL may stand in the queue behind
/// one that waits for a partner, and ranks deadlock (parallel/comm/launch_model.h). CUDA reads the variable
/// when it starts.
void give_streams_queues() {
  constexpr const char* variable = "CUDA_DEVICE_MAX_CONNECTIONS";
  constexpr int most = 32;
  if (const char* set = std::getenv(variable); set && std::atoi(set) < most)
    log::warn("{}={} is raised to {}: with fewer hardware queues, communication could deadlock", variable,
              set, most);
  setenv(variable, std::to_string(most).c_str(), 1);
}

}  // namespace

int attribute_of(int which, int ordinal) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(which), ordinal) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return value;
}

double bandwidth_of(int ordinal) {
  // Attributes, because CUDA 13 took the clocks out of cudaDeviceProp. kHz, bits, two transfers per clock.
  return 2.0 * 1e3 * attribute_of(cudaDevAttrMemoryClockRate, ordinal) *
         attribute_of(cudaDevAttrGlobalMemoryBusWidth, ordinal) / 8.0;
}

Status query() {
  give_streams_queues();
  Status status;
  status.built = true;
  status.toolkit = version_text(CUDART_VERSION);
  status.architectures = architectures_text(NRL_CUDA_ARCHITECTURES);
  int version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess && version > 0) status.driver = version_text(version);
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    status.problem = why_none(error, status);
    return status;
  }
  bool usable = false;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    if (const cudaError_t error = cudaGetDeviceProperties(&p, i); error != cudaSuccess) {
      cudaGetLastError();
      status.problem = fmt::format("device {} does not answer: {} ({})", i, cudaGetErrorString(error),
                                   cudaGetErrorName(error));
      return status;
    }
    DeviceInfo d;
    d.name = p.name;
    d.major = p.major;
    d.minor = p.minor;
    d.memory = p.totalGlobalMem;
    d.multiprocessors = p.multiProcessorCount;
    d.uuid = uuid_text(p.uuid.bytes);
    d.memory_bandwidth = bandwidth_of(i);
    d.ecc = p.ECCEnabled != 0;
    d.mig = d.name.find(" MIG ") != std::string::npos;
    const int mode = attribute_of(cudaDevAttrComputeMode, i);
    d.exclusive = mode == cudaComputeModeExclusiveProcess || mode == cudaComputeModeExclusive;
    d.prohibited = mode == cudaComputeModeProhibited;
    d.fits = runs_on(NRL_CUDA_ARCHITECTURES, d.major, d.minor);
    usable = usable || (d.fits && !d.prohibited);
    status.devices.push_back(d);
  }
  if (count == 0) {
    status.problem = why_none(cudaErrorNoDevice, status);
  } else if (!usable) {
    const DeviceInfo& d = status.devices.front();
    status.problem =
        d.prohibited
            ? fmt::format("{} is in compute mode PROHIBITED; ask the administrator for nvidia-smi -c DEFAULT",
                          d.name)
            : fmt::format(
                  "this build has kernels for compute capability {}, and {} has {}.{}; build with "
                  "-DCMAKE_CUDA_ARCHITECTURES={}{}",
                  status.architectures, d.name, d.major, d.minor, d.major * 10 + d.minor,
                  d.major >= 9 ? "a" : "");
  }
  return status;
}

}  // namespace nrl::cuda
