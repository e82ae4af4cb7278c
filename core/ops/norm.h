#pragma once
// RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016), with the residual addition fused in.
//
// Rows are the product of all leading dimensions, the last dimension is normalized; tensors of rank 3 (N,
// heads, D) may be strided views (QK-norm). Activations (x, out, residual, ...) share one dtype, f32, bf16 or
// f16; weight and bias are f32 or bf16, f16 with f16 activations; statistics and weight gradients are f32.
// Arithmetic is f32.

#include "core/ops/dropout.h"
#include "core/ops/exec.h"

namespace nrl::ops {

enum class NormKind : uint8_t { rms, layer };

/// sum = dropout(x) + residual (if given, written to `sum`), then
/// rms:   out = sum * rstd * w,                rstd = 1 / sqrt(mean(sum^2) + eps)
/// layer: out = (sum - mean) * rstd * w + bias, rstd = 1 / sqrt(var(sum) + eps), var with divisor D,
/// with w = weight + weight_offset, in f32.
/// `sum` may alias x or residual. Without residual, x itself is normalized and `sum` must be absent. mean and
/// rstd may be absent (inference). out may alias x only when neither x nor sum is read later. amax =
/// max(amax, |out|), where NaN stays and amax must be >= 0.
///
/// out may be absent where its readers compute it from the sum and rstd (QuantizeNorm in quantize.h).
struct NormForward {
  NormKind kind = NormKind::rms;
  float eps = 1e-5f;
  Tensor x;                   ///< (..., D)
  Tensor residual = {};       ///< optional (..., D)
  Tensor sum = {};            ///< (..., D), required with residual
  Tensor weight;              ///< (D)
  float weight_offset = 0;    ///< 1 if weights are stored as their differences from 1 (Gemma)
  Tensor bias = {};           ///< (D), layer only, optional
  Tensor out = {};            ///< (..., D), optional with rstd
  Tensor mean = {};           ///< (rows) f32, layer only, optional
  Tensor rstd = {};           ///< (rows) f32, optional
  Tensor amax = {};           ///< (1) f32, optional; of out as it is stored, or would be
  FusedDropout dropout = {};  ///< of x before the addition, with the mask of ops::dropout;
                              ///< p > 0 requires residual and x of rank 2
};

/// With dy = dout * w and xhat = (x - mean) * rstd (rms: mean = 0 and no term mean_dy):
///   dx       = rstd * (dy - mean_dy - xhat * mean_dy_xhat) + dresidual (if given)
///   dweight += sum over rows of dout * xhat,   dbias += sum over rows of dout (when given)
/// dx may alias dout or dresidual. amax = max(amax, |dx|), as in NormForward. The order of the sums over rows
/// depends only on the shape and the number of partial sums (Exec::partials()).
struct NormBackward {
  NormKind kind = NormKind::rms;
  Tensor dout;    ///< (..., D)
  Tensor x;       ///< (..., D), the normalized input (`sum` of the forward when a residual was fused)
  Tensor weight;  ///< (D)
  float weight_offset = 0;
  Tensor mean = {};       ///< (rows) f32, layer only
  Tensor rstd;            ///< (rows) f32
  Tensor dresidual = {};  ///< optional (..., D)
  Tensor dx;              ///< (..., D)
  Tensor amax = {};       ///< (1) f32, optional; of dx as it is stored
  Tensor dweight = {};    ///< optional (D) f32
  Tensor dbias = {};      ///< optional (D) f32, layer only
};

void norm_forward(Exec& exec, const NormForward& a);
void norm_backward(Exec& exec, const NormBackward& a);
Cost cost(const Exec& exec, const NormForward& a);
Cost cost(const Exec& exec, const NormBackward& a);
size_t workspace(const Exec& exec, const NormBackward& a);

/// Workspace of norm_backward: `partials` (Exec::partials()) partial sums of dweight and dbias.
size_t norm_backward_workspace(int64_t d, int partials);

}  // namespace nrl::ops
