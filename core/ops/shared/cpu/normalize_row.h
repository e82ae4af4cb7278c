#pragma once
// The output of a norm from its input and saved statistics, where it is stored and where a reader computes
// it.

#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/element.h"

namespace nrl::ops::NRL_ISA {

/// out = (in - mean) * rstd * (weight + offset) + bias of d elements of a row, rounded to T; `bias` may be
/// null.
template <class T, class W>
NRL_INLINE void normalize_row(const T* in, float mean, float rstd, const W* weight, float offset,
                              const W* bias, T* out, int64_t d) {
  const auto value = [=](int64_t i, auto part) __attribute__((always_inline)) {
    return element::normalized(part.load(in + i), mean, rstd, part.load(weight + i) + offset);
  };
  if (bias)
    for_lanes(d, [=](int64_t i, auto part) { part.store(out + i, value(i, part) + part.load(bias + i)); });
  else
    for_lanes(d, [=](int64_t i, auto part) { part.store(out + i, value(i, part)); });
}

}  // namespace nrl::ops::NRL_ISA
