#pragma once
// Mathematics of activations on a GPU (element.h), where gradients are stored and where they are computed as
// they are rounded.

#include <type_traits>

#include "core/device/kernel.h"
#include "core/ops/shared/element.h"

namespace nrl::ops::NRL_GPU {

/// The fast functions are accurate enough for bf16. f32 moves twice the bytes per element, which hides the
/// cost of the exact ones.
struct ExactMath : kernel::GpuMath {
  static __device__ __forceinline__ float exp(float x) { return expf(x); }
  static __device__ __forceinline__ float reciprocal(float x) { return 1.0f / x; }
  static __device__ __forceinline__ kernel::Normal normal(float x) {
    return {__fmaf_rn(0.5f, erf(x * 0.70710678f), 0.5f), exp(-0.5f * x * x)};
  }
};
template <class T>
using ActivationMath = std::conditional_t<sizeof(T) == 4, ExactMath, kernel::GpuMath>;

}  // namespace nrl::ops::NRL_GPU
