#pragma once
// The gradient of an activation by a part of a row, where it is stored and where it is computed as it is
// rounded.

#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/element.h"

namespace nrl::ops::NRL_ISA {

/// Computes the gradients of n elements, rounded to T. gated: dgate = dout * up * f'(gate), dup = dout *
/// f(gate); else dgate = dout * f'(gate), and `up` and `dup` have no meaning. dgate may be dout or gate, dup
/// may be up.
template <class T, Activation kind, bool gated>
NRL_INLINE void activation_gradients(const T* dout, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {
  for_lanes(n, [=](int64_t i, auto part) {
    const Lanes g = part.load(dout + i);
    const auto y = element::activation<MathFor<T>, kind>(part.load(gate + i));
    if constexpr (gated) {
      const Lanes value = element::gate_gradient(y.slope, part.load(up + i), g);
      part.store(dgate + i, value);
      part.store(dup + i, element::up_gradient(y.value, g));
    } else {
      part.store(dgate + i, g * y.slope);
    }
  });
}

}  // namespace nrl::ops::NRL_ISA
