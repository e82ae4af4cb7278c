#pragma once
// The order in which blocks, warps and lanes run; internal to the engine.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>

#include "core/base/philox.h"
#include "core/device/sim/engine/engine.h"

namespace nrl::sim {

/// Puts first, first + 1, ... into `out` in the order of `options`; `stream` tells several random ones apart.
template <class Int>
void permute(const Options& options, uint64_t stream, std::span<Int> out, Int first = 0) {
  std::iota(out.begin(), out.end(), first);
  if (options.order == Order::reverse) std::reverse(out.begin(), out.end());
  if (options.order != Order::random) return;
  PhiloxBlock draws{};
  for (size_t i = out.size(); i > 1; --i) {
    const size_t k = out.size() - i;
    if (k % draws.size() == 0) draws = philox4x32(k, stream, options.seed);
    std::swap(out[i - 1], out[draws[k % draws.size()] % i]);
  }
}

}  // namespace nrl::sim
