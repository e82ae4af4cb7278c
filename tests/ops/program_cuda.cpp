// gpu_tests: the cases on the first GPU. Buffers lie in managed memory, which both sides can access.

#include <cstdlib>

#include <cuda_runtime_api.h>

#include "tests/ops/backend.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

void* allocate_managed(size_t bytes) {
  void* p = nullptr;
  if (const cudaError_t error = cudaMallocManaged(&p, bytes); error != cudaSuccess) {
    fail(Exit::out_of_memory, "cudaMallocManaged of {} bytes: {}", bytes, cudaGetErrorString(error));
  }
  return p;
}

}  // namespace

Program program() {
  setenv("CUDA_LAUNCH_BLOCKING", "1", 1);  // cases read results as soon as an op returns
  Program program;
  try {
    Backend b;
    b.name = "cuda";
    b.gpu = true;
    b.device = device::open_cuda(0);
    b.device->bind_thread();
    ops::LibraryOptions options;
    options.deterministic = true;  // cases are compared bit by bit with a second run
    b.libraries = ops::open_cuda_libraries(*b.device, options);
    b.kernels = complete(ops::cuda_kernels());
    b.stream = std::make_shared<device::Stream>(*b.device);
    b.finish = [device = b.device] { device->synchronize(); };
    buffer_memory().allocate = allocate_managed;
    buffer_memory().release = [](void* p) { cudaFree(p); };
    program.backends.push_back(std::move(b));
  } catch (const Error& e) {
    if (e.code() != Exit::unavailable) throw;
    program.skipped = e.what();
  }
  return program;
}

}  // namespace nrl::ops_test
