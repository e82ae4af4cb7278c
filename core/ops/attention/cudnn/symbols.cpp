#include "core/ops/attention/cudnn/symbols.h"

#include <cstring>
#include <string>
#include <unordered_map>

#include <dlfcn.h>

#include <cuda_runtime_api.h>

namespace nrl::ops::attention {
namespace {

// cudnn-frontend looks for the CUDA runtime in a shared library of one of two names. This program links the
// runtime statically: resolve its symbols here, whatever versions are installed.
const char runtime_library[] = "libcudart.so.13";

}  // namespace

void* open_library(const char* name, int flags) {
  if (std::strncmp(name, "libcudart.so", 12) != 0) return dlopen(name, flags);
  return std::strcmp(name, runtime_library) == 0 ? const_cast<char*>(runtime_library) : nullptr;
}

void* find_symbol(void* library, const char* name) {
  if (library != runtime_library) return dlsym(library, name);
  static const std::unordered_map<std::string, void*> symbols = {
      {"cudaGetDevice", reinterpret_cast<void*>(&cudaGetDevice)},
      {"cudaGetDeviceProperties",
       reinterpret_cast<void*>(static_cast<cudaError_t (*)(cudaDeviceProp*, int)>(&cudaGetDeviceProperties))},
      {"cudaGetErrorString", reinterpret_cast<void*>(&cudaGetErrorString)},
      {"cudaStreamIsCapturing", reinterpret_cast<void*>(&cudaStreamIsCapturing)},
      {"cudaMemcpyAsync",
       reinterpret_cast<void*>(
           static_cast<cudaError_t (*)(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t)>(
               &cudaMemcpyAsync))},
      {"cudaMemsetAsync",
       reinterpret_cast<void*>(
           static_cast<cudaError_t (*)(void*, int, size_t, cudaStream_t)>(&cudaMemsetAsync))},
  };
  const auto it = symbols.find(name);
  return it == symbols.end() ? nullptr : it->second;
}

}  // namespace nrl::ops::attention
