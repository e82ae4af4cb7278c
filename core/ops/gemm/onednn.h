#pragma once
// f32 GEMMs of the linear layers: a thin wrapper over oneDNN, whose headers only onednn.cpp includes.

#include <cstddef>
#include <cstdint>

#include "core/ops/exec.h"

namespace nrl::ops {

/// bf16 operands are upcast to f32 in tiles of this many rows of x and of the weight, which bounds the
/// scratch memory. The tiles are large enough that upcasting costs about 1 % of the GEMM.
inline constexpr int64_t upcast_tile = 2048;

/// Row-major f32 operand; columns are contiguous.
struct Matrix {
  float* data = nullptr;
  int64_t ld = 0;  ///< elements between rows
};

/// y (n, m) = or += x (n, k) w^T, w (m, k), plus bias (m) when it is not null (then not accumulate). Without
/// scratch memory nothing is prepared (and cached) for the shape.
void gemm_forward(int64_t n, int64_t m, int64_t k, Matrix x, Matrix w, Matrix y, const float* bias,
                  bool accumulate, int threads, Workspace scratch);
/// dx (n, k) = or += dy (n, m) w, w (m, k).
void gemm_backward_data(int64_t n, int64_t m, int64_t k, Matrix dy, Matrix w, Matrix dx, bool accumulate,
                        int threads);
/// dw (m, k) = or += dy^T x, dy (n, m), x (n, k).
void gemm_backward_weight(int64_t n, int64_t m, int64_t k, Matrix dy, Matrix x, Matrix dw, bool accumulate,
                          int threads);

/// Bytes of `scratch` that gemm_forward needs (0 for most shapes).
size_t gemm_scratch(int64_t n, int64_t m, int64_t k, int threads);

}  // namespace nrl::ops
