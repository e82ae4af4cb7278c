// The libraries of a GPU.

#include "core/ops/attention/engine.h"
#include "core/ops/libraries.h"
#include "core/ops/linear/cublaslt.h"

namespace nrl::ops {

std::unique_ptr<Libraries> open_cuda_libraries(device::Runtime& runtime, const LibraryOptions& options) {
  auto libraries = std::make_unique<Libraries>();
  libraries->tf32 = options.tf32;
  libraries->gemm = gemm::open_cublaslt(runtime, options);
  libraries->attention =
      attention::open_cudnn(runtime, {.deterministic = options.deterministic}, libraries->why_no_attention);
  return libraries;
}

}  // namespace nrl::ops
