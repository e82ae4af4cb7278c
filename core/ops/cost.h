#pragma once
// The work that a call of an op gives the device, and the scratch memory that it takes. Every op declares a
// cost() next to its contract, with the same arguments; predictions and benchmarks use it.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/tensor/tensor.h"

namespace nrl::ops {

struct Exec;

/// The kind of work, which decides what limits a call.
enum class Work : uint8_t { memory, gemm, attention };

/// Bytes count each operand once, however often a kernel reads it. Optional operands that are absent count 0.
struct Cost {
  Work work = Work::memory;
  double read = 0, written = 0;   ///< bytes of the operands: what any implementation must move
  double scratch = 0;             ///< bytes read and written in the workspace besides
  double flops = 0;               ///< of matrix products; 0 for memory-bound kernels
  int launches = 1;               ///< kernels on a GPU
  DType operands = DType::f32;    ///< gemm, attention: type of the factors
  bool tf32 = false;              ///< gemm: f32 operands in TF32
  std::array<int64_t, 3> gemm{};  ///< gemm: rows and columns of the result, inner dimension
  double epilogue = 0;            ///< gemm: bytes read and written after its main loop
  int64_t groups = 0;             ///< groups of rows (experts), each with a GEMM or copy of its own; 0: none
  int64_t head_dim = 0;           ///< attention
  double keys = 0;                ///< attention: the mean number of keys that a query sees
  bool backward = false;          ///< attention
  bool library = false;           ///< attention: by the library (attention_engine.h), not our own kernels

  double bytes() const { return read + written; }
};

/// A call in a dry run.
struct Call {
  const char* op = "";     ///< name of the kernel (kernel_table.h), or of a transfer without one
  const char* range = "";  ///< the innermost trace::Range around the op; "": none
  Cost cost = {};
  int step = -1;        ///< Exec::step
  int microbatch = -1;  ///< Exec::microbatch
  int pieces = 1;       ///< Exec::pieces
};

/// Bytes of the tensors together; absent ones count 0.
template <class... T>
double bytes_of(const T&... tensors) {
  const auto bytes = [](const Tensor& t) { return t ? static_cast<double>(t.bytes()) : 0.0; };
  return (0.0 + ... + bytes(tensors));
}

/// Adds a call to Exec::calls, if calls are collected.
void note_call(Exec& exec, const char* op, const Cost& cost);

/// Raises Exec::scratch to `bytes`, if the largest workspace is wanted. Every op whose kernels use
/// Exec::workspace declares a workspace() next to its cost(), with the same arguments: the bytes that the
/// call takes.
void note_scratch(Exec& exec, size_t bytes);

}  // namespace nrl::ops
