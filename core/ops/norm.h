#pragma once
// RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016), with the residual addition fused in.
//
// Rows are the product of all leading dimensions, the last dimension is normalised; tensors of rank 3 (N,
// heads, D) may be strided views (QK-norm). Activations (x, out, residual, ...) share one dtype, f32 or bf16;
// weight and bias are f32 or bf16; statistics and weight gradients are f32. Arithmetic is f32.

#include "core/ops/dropout.h"
#include "core/ops/exec.h"

namespace nrl::ops {

enum class NormKind : uint8_t { rms, layer };

/// sum = dropout(x) + residual (if given, written to `sum`), then
/// rms:   out = sum * rstd * weight,                rstd = 1 / sqrt(mean(sum^2) + eps)
/// layer: out = (sum - mean) * rstd * weight + bias, rstd = 1 / sqrt(var(sum) + eps), var with divisor D.
/// `sum` may alias x or residual. Without residual, x itself is normalised and `sum` is not given. mean/rstd
/// may be absent (inference). out may alias x only when neither x nor sum is needed later. When
/// out.scales.amax is set, max(|out|) is combined into it (the larger stays; it starts at 0 or above; NaN
/// stays), for recipes that quantize what follows.
struct NormForward {
  NormKind kind = NormKind::rms;
  float eps = 1e-5f;
  Tensor x;                   ///< (..., D)
  Tensor residual = {};       ///< optional (..., D)
  Tensor sum = {};            ///< (..., D), required with residual
  Tensor weight;              ///< (D)
  Tensor bias = {};           ///< (D), layer only, optional
  Tensor out;                 ///< (..., D)
  Tensor mean = {};           ///< (rows) f32, layer only, optional
  Tensor rstd = {};           ///< (rows) f32, optional
  FusedDropout dropout = {};  ///< of x, on its way into the residual stream, with the mask of ops::dropout;
                              ///< p > 0 needs residual and x of rank 2
};

/// dx = gradient of the norm at x (+ dresidual if given): the gradient of the residual stream in one pass.
/// dx may alias dout or dresidual. dweight and dbias are accumulated (+=) when given; the sum over rows runs
/// in an order that depends only on the shape and the number of threads.
struct NormBackward {
  NormKind kind = NormKind::rms;
  Tensor dout;            ///< (..., D)
  Tensor x;               ///< (..., D), what was normalised (`sum` of the forward when a residual was fused)
  Tensor weight;          ///< (D)
  Tensor mean = {};       ///< (rows) f32, layer only
  Tensor rstd;            ///< (rows) f32
  Tensor dresidual = {};  ///< optional (..., D)
  Tensor dx;              ///< (..., D)
  Tensor dweight = {};    ///< optional (D) f32
  Tensor dbias = {};      ///< optional (D) f32, layer only
};

void norm_forward(Exec& exec, const NormForward& a);
void norm_backward(Exec& exec, const NormBackward& a);

/// Workspace of norm_backward: per-thread partial sums of the weight gradients.
size_t norm_backward_workspace(int64_t d, int threads);

}  // namespace nrl::ops
