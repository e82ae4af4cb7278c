// The GPU's tables and libraries in a build without the CUDA toolkit.

#include "core/ops/kernel_table.h"
#include "core/ops/libraries.h"

namespace nrl::ops {

const KernelTable& cuda_kernels() {
  fail(Exit::unavailable, "this build was made without the CUDA toolkit");
}

std::unique_ptr<Libraries> open_cuda_libraries(device::Runtime&, const LibraryOptions&) {
  fail(Exit::unavailable, "this build was made without the CUDA toolkit");
}

std::vector<std::string> cuda_library_versions() {
  return {};
}

}  // namespace nrl::ops
