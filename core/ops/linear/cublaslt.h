#pragma once
// The GEMM engine on cuBLASLt; CUDA builds only.

#include <memory>

#include "core/ops/libraries.h"
#include "core/ops/linear/gemm_engine.h"

namespace nrl::ops::gemm {

/// Exit::unavailable when the library refuses the device.
std::unique_ptr<Engine> open_cublaslt(device::Runtime& runtime, const LibraryOptions& options);

}  // namespace nrl::ops::gemm
