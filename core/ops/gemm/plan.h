#pragma once
// Describes a GEMM on a GPU and checks, without GPU or library, whether hardware and cuBLASLt support it. The
// rules follow the cuBLAS 13 documentation of cublasLtMatmul.

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/base/scaling.h"

namespace nrl::ops::gemm {

/// The operation that a GEMM applies to op(a) op(b). `aux` is a second (rows, cols) matrix.
enum class Epilogue : uint8_t {
  none,
  bias,           ///< + bias[col]
  gelu,           ///< tanh form
  gelu_bias,      ///< gelu(op(a) op(b) + bias)
  gelu_aux,       ///< gelu, its argument also written to aux
  gelu_aux_bias,  ///< both
  dgelu,          ///< op(a) op(b) * gelu'(aux), aux is read
};

/// Arithmetic of f32 operands.
enum class Compute : uint8_t { f32, tf32 };

/// Compute capability times ten.
enum class Architecture : int { sm80 = 80, sm90 = 90, sm100 = 100 };
/// Maps the major number of a compute capability.
constexpr Architecture architecture_of(int major) {
  return major >= 10 ? Architecture::sm100 : major == 9 ? Architecture::sm90 : Architecture::sm80;
}

/// A row-major operand: (rows, inner) for a, (inner, cols) for b, or its transpose.
struct Operand {
  DType dtype = DType::bf16;
  int64_t ld = 0;           ///< elements between stored rows
  bool transposed = false;  ///< stored as the transpose
  int alignment = 16;       ///< of the pointer, in bytes
  Scaling scaling = Scaling::none;
  bool operator==(const Operand&) const = default;
};

/// d (rows, cols) = or += (accumulate) op(a) op(b), row-major.
struct GemmPlan {
  int64_t rows = 0, cols = 0, inner = 0;
  Operand a, b;
  Operand d;  ///< never transposed
  Epilogue epilogue = Epilogue::none;
  Operand aux;  ///< with an epilogue that has one
  DType bias = DType::bf16;
  bool accumulate = false;
  Compute compute = Compute::f32;
  bool fast_accumulation = false;  ///< FP8: fewer bits between tensor-core steps; for forward passes

  bool operator==(const GemmPlan&) const = default;
  bool fp8() const { return size_of(a.dtype) == 1 || size_of(b.dtype) == 1; }
  bool has_bias() const {
    return epilogue == Epilogue::bias || epilogue == Epilogue::gelu_bias ||
           epilogue == Epilogue::gelu_aux_bias;
  }
  bool has_aux() const {
    return epilogue == Epilogue::gelu_aux || epilogue == Epilogue::gelu_aux_bias ||
           epilogue == Epilogue::dgelu;
  }
  double flops() const {
    return 2.0 * static_cast<double>(rows) * static_cast<double>(cols) * static_cast<double>(inner);
  }
  /// Why cuBLASLt or the hardware does not support it, in words; empty when it does.
  std::string validate(Architecture architecture) const;
  /// The plan as one word, equal for plans of one GEMM (unused aux and bias fields do not count), for
  /// messages and the tune file: "64x32x48_bf16N/48/16_bf16T/48/16_f32N/32/16_...".
  std::string key() const;
};

/// Hash of a plan, for containers that look plans up by their value.
struct PlanHash {
  size_t operator()(const GemmPlan& plan) const;
};

/// The same GEMM for a library with column-major matrices: D^T = op(B)^T op(A)^T, so that the operands
/// change places and keep their memory.
struct ColumnMajor {
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false;           ///< of the library's a (our b) and b (our a)
  int64_t a_rows = 0, a_cols = 0, b_rows = 0, b_cols = 0;  ///< as stored
};
ColumnMajor column_major(const GemmPlan& plan);

/// Workspace of each cuBLASLt GEMM, 256-byte aligned; NVIDIA's recommendation for Hopper.
inline constexpr size_t workspace_bytes = size_t{32} << 20;

}  // namespace nrl::ops::gemm
