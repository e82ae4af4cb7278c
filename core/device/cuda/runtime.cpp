#include "core/device/runtime.h"

#include <cuda_runtime_api.h>

#include "core/base/error.h"

namespace nrl::device {

void check_launch(const char* kernel) {
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    fail(Exit::internal, "launching {} failed: {}", kernel, cudaGetErrorString(error));
}

void allow_shared_memory(const void* kernel, size_t bytes) {
  if (bytes <= 48 * 1024) return;
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
      error != cudaSuccess)
    fail(Exit::internal, "a kernel cannot have {} bytes of shared memory: {}", bytes,
         cudaGetErrorString(error));
}

}  // namespace nrl::device
