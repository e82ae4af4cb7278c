#pragma once
// The engines of the GPU's linear and attention ops: libraries on CUDA, host code on the simulated device.

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/device/runtime.h"

namespace nrl::ops {

namespace gemm {
class Engine;
}
namespace attention {
class Engine;
}

struct LibraryOptions {
  bool tf32 = false;       ///< f32 GEMMs in TF32 (10 bits of mantissa)
  bool autotune = false;   ///< time the candidates of every new GEMM shape instead of taking the first
  std::string tune_cache;  ///< file of timed choices, read and extended; empty: none
  /// Gradients have the same bits in every run, for which cuDNN's attention needs much memory (CudnnOptions).
  bool deterministic = false;
};

struct Libraries {
  bool tf32 = false;                             ///< f32 GEMMs in TF32
  std::shared_ptr<gemm::Engine> gemm;            ///< never null
  std::shared_ptr<attention::Engine> attention;  ///< null: our own kernels run all shapes
  std::string why_no_attention;                  ///< where `attention` is null
  /// Texts about attention that have been shown, each of them once: by the banner of a run or by an op whose
  /// problem the library did not take.
  std::set<std::string> shown;
};

/// cuBLASLt and cuDNN on `runtime`, which must outlive them. Exit::unavailable when a library is missing or
/// does not support the device.
std::unique_ptr<Libraries> open_cuda_libraries(device::Runtime& runtime, const LibraryOptions& options);

/// "cuBLASLt 13.1.0", "cuDNN 9.19.0": the libraries that this process has loaded; needs no GPU. Empty in a
/// build without CUDA.
std::vector<std::string> cuda_library_versions();

/// For the simulated device: GEMMs in host code in stream order. Linked by tests only.
std::unique_ptr<Libraries> open_sim_libraries(device::Runtime& runtime, const LibraryOptions& options);

}  // namespace nrl::ops
