#include "core/device/cuda/devices.h"

#include <cuda_runtime_api.h>

#include <cstdio>

namespace nrl::cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

std::string uuid_text(const char* bytes) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char digits[4];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(bytes[i]));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits;
  }
  return text;
}

Status query() {
  Status status;
  status.built = true;
  status.toolkit = version_text(CUDART_VERSION);
  int version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess && version > 0) status.driver = version_text(version);
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    status.problem =
        status.driver.empty() ? "there is no NVIDIA driver on this machine" : cudaGetErrorString(error);
    return status;
  }
  if (count == 0) status.problem = "the driver shows no device";
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    if (cudaGetDeviceProperties(&p, i) == cudaSuccess)
      status.devices.push_back({p.name, p.major, p.minor, p.totalGlobalMem, p.multiProcessorCount,
                                uuid_text(p.uuid.bytes)});
  }
  return status;
}

}  // namespace nrl::cuda
