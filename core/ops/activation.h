#pragma once
// Activations of the MLP: GELU (tanh and erf forms) and the gated SwiGLU / GeGLU (Shazeer 2020).

#include "core/ops/exec.h"

namespace nrl::ops {

enum class Activation : uint8_t { none, silu, gelu_tanh, gelu_erf };

/// plain: out = f(x), x (N, F). gated: out = f(gate) * up, x (N, 2F) with gate in columns [0, F) and up
/// in [F, 2F).
struct ActivationForward {
  Activation kind = Activation::silu;
  bool gated = false;
  Tensor x;    ///< (N, F) or (N, 2F); f32, bf16 or f16
  Tensor out;  ///< (N, F), same dtype
};

/// dx is (N, F) or (N, 2F) and may alias x. With `out`, also out = f(x) (gated: f(gate) * up), with the bits
/// of activation_forward; it may alias dout.
struct ActivationBackward {
  Activation kind = Activation::silu;
  bool gated = false;
  Tensor dout;  ///< (N, F)
  Tensor x;
  Tensor dx;
  Tensor out = {};  ///< optional (N, F), same dtype
};

void activation_forward(Exec& exec, const ActivationForward& a);
void activation_backward(Exec& exec, const ActivationBackward& a);
Cost cost(const Exec& exec, const ActivationForward& a);
Cost cost(const Exec& exec, const ActivationBackward& a);

}  // namespace nrl::ops
