#pragma once
// The engines of the GPU's linear and attention ops: libraries on CUDA, host code on the simulated device.

#include <memory>
#include <string>
#include <vector>

#include "core/device/runtime.h"
#include "core/ops/exec.h"

namespace nrl::ops {

namespace gemm {
class Engine;
}
namespace attention {
class Engine;
}

struct LibraryOptions {
  bool tf32 = false;             ///< f32 GEMMs in TF32 (10 bits of mantissa)
  bool autotune = false;         ///< time the candidates of every new GEMM shape instead of taking the first
  std::string gemm_tuning = {};  ///< timed choices, see gemm::TuneCache; autotuning extends them; empty: none
  /// Gradients have the same bits in every run, for which cuDNN's attention needs much memory (CudnnOptions).
  bool deterministic = false;
};

/// The implementation that runs a pass of an op: {"attention", "forward", "cuDNN 9.19.0"}.
struct LibraryChoice {
  std::string op, pass, implementation;
  bool operator==(const LibraryChoice&) const = default;
};

struct Libraries {
  bool tf32 = false;                             ///< f32 GEMMs in TF32
  std::shared_ptr<gemm::Engine> gemm;            ///< never null
  std::shared_ptr<attention::Engine> attention;  ///< null: our own kernels run all shapes
  std::string why_no_attention;                  ///< where `attention` is null
  /// Each choice once, in the order of the ops: note_choice().
  std::vector<LibraryChoice> choices;
  /// Why a step cannot be captured in a CUDA graph, found by its dry run (Exec::needed); empty: it can.
  std::string not_capturable;
};

/// Adds a choice that is not known yet. A dry run of a step finds those that the banner shows; a later one is
/// logged, because the banner did not foresee it.
void note_choice(const Exec& exec, LibraryChoice choice);

/// cuBLASLt and cuDNN on `runtime`, which must outlive them. Exit::unavailable when a library is missing or
/// does not support the device.
std::unique_ptr<Libraries> open_cuda_libraries(device::Runtime& runtime, const LibraryOptions& options);

/// "cuBLASLt 13.1.0 in FILE", "cuDNN 9.19.0 in FILE": the libraries that this process has loaded; needs no
/// GPU. Empty in a build without CUDA.
std::vector<std::string> cuda_library_versions();

/// For a dry run on a device with this major number of its compute capability: answers what the rules of the
/// libraries allow (GemmPlan::validate, attention::unsupported_reason) and computes nothing.
std::unique_ptr<Libraries> open_dry_run_libraries(int major, const LibraryOptions& options);
/// Why a device with this major number does not multiply FP8 inputs and weights with these scales; empty if
/// it does.
std::string fp8_gemm_refusal(int major, Scaling input, Scaling weight);

/// The same of attention with FP8 operands, results in `out` and heads of d columns, which devices with this
/// major number run.
inline constexpr int fp8_attention_major = 10;
std::string fp8_attention_refusal(int major, DType out, int64_t d);

}  // namespace nrl::ops
