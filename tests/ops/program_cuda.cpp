// gpu_tests: the cases on the first GPU.

#include "tests/ops/device_backend.h"

namespace nrl::ops_test {

Program program() {
  Program program;
  try {
    const std::shared_ptr<device::Runtime> device = device::open_cuda(0);
    device->bind_thread();
    const auto stream = std::make_shared<device::Stream>(*device);
    const auto backend = [&](const char* name, bool deterministic) {
      ops::LibraryOptions options;
      options.deterministic = deterministic;
      Backend b = device_backend(name, device, stream, ops::cuda_kernels(),
                                 ops::open_cuda_libraries(*device, options));
      b.deterministic = deterministic;
      return b;
    };
    program.backends.push_back(backend("cuda", true));
    // As training runs; only the gradients of attention depend on it.
    program.backends.push_back(backend("cuda, not deterministic", false));
    program.backends.back().only = {"attention"};
  } catch (const Error& e) {
    if (e.code() != Exit::unavailable) throw;
    program.skipped = e.what();
  }
  return program;
}

}  // namespace nrl::ops_test
