#pragma once
// Interface of the GPU's GEMM backends: cuBLASLt, or host code on the simulated device.

#include <memory>
#include <string>
#include <vector>

#include "core/device/runtime.h"
#include "core/ops/exec.h"
#include "core/ops/gemm/plan.h"
#include "core/ops/libraries.h"

namespace nrl::ops::gemm {

/// Device memory of a GEMM. Scales lie as scale_matrix() says for the operand as stored.
struct GemmOperands {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;  ///< read as well when the plan accumulates
  const void* bias = nullptr;
  void* aux = nullptr;
  const void* scale_a = nullptr;  ///< with a scaling of the plan's a
  const void* scale_b = nullptr;
  float alpha = 1;  ///< of the product; the library's tuning does not depend on it
};

/// A GEMM whose algorithms were timed (LibraryOptions::autotune).
struct Timing {
  std::string key;      ///< GemmPlan::key()
  double first_ms = 0;  ///< of the algorithm that the library recommends
  double best_ms = 0;   ///< of the one that was chosen
};

class Engine {
 public:
  virtual ~Engine() = default;
  /// False: this GEMM is not available, and the caller must run its parts one by one. Cached per plan.
  virtual bool supports(const GemmPlan& plan) = 0;
  /// Enqueues a supported GEMM. `workspace` has at least workspace_bytes. The first call of a plan chooses an
  /// algorithm, which must not happen while a graph is captured.
  virtual void run(const GemmPlan& plan, const GemmOperands& operands, Workspace workspace,
                   device::StreamHandle stream) = 0;
  /// The GEMMs that this engine has timed, in that order.
  virtual std::vector<Timing> timings() const { return {}; }
};

/// "cuBLASLt 13.1.0", as loaded (CUDA builds only).
std::string cublaslt_version();

/// The engine on cuBLASLt (CUDA builds only). Exit::unavailable when the library refuses the device.
std::unique_ptr<Engine> open_cublaslt(device::Runtime& runtime, const LibraryOptions& options);

}  // namespace nrl::ops::gemm
