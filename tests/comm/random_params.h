#pragma once
// Parameters of random sizes for tests of flat buffers.

#include <string>
#include <vector>

#include "core/base/philox.h"
#include "parallel/data/flat_buckets.h"

namespace nrl::test {

/// `count` parameters of 1 to `most` elements.
inline std::vector<parallel::ParamSpec> random_params(uint64_t seed, int count, int64_t most) {
  const PhiloxStream stream(seed, "sizes");
  std::vector<parallel::ParamSpec> out;
  for (int i = 0; i < count; ++i) {
    const auto bits = stream.bits(static_cast<uint64_t>(i));
    out.push_back({"p" + std::to_string(i), 1 + static_cast<int64_t>(bits % static_cast<uint64_t>(most))});
  }
  return out;
}

}  // namespace nrl::test
