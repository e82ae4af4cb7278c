#pragma once
// Sums along a row in vectors (lanes.h).

#include "core/ops/shared/cpu/lanes.h"

namespace nrl::ops::NRL_ISA {

/// Sum of all elements, of halves first.
NRL_INLINE float sum_of(Lanes v) {
#pragma GCC unroll 4
  for (int h = lanes / 2; h > 0; h /= 2) {
    IntLanes other;
#pragma GCC unroll 16
    for (int l = 0; l < lanes; ++l) other[l] = l ^ h;
    v += __builtin_shuffle(v, other);
  }
  return v[0];
}

/// Sum of the vectors body(i, access) of for_lanes(n, body): in several chains, which hide the latency of
/// additions.
template <int chains = 4, class Body>
NRL_INLINE float sum_lanes_of(int64_t n, const Body& body) {
  Lanes s[chains] = {};
  int64_t i = 0;
  for (; i + chains * lanes <= n; i += chains * lanes) {
#pragma GCC unroll 8
    for (int c = 0; c < chains; ++c) s[c] += body(i + c * lanes, WholeLanes());
  }
  for (; i + lanes <= n; i += lanes) s[0] += body(i, WholeLanes());
  if (i < n) {
    const FirstLanes part(n - i);
    s[1] += part.existing(body(i, part));
  }
#pragma GCC unroll 4
  for (int apart = 1; apart < chains; apart *= 2)
#pragma GCC unroll 4
    for (int c = 0; c < chains; c += 2 * apart) s[c] += s[c + apart];
  return sum_of(s[0]);
}

}  // namespace nrl::ops::NRL_ISA
