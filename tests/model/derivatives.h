#pragma once
// Finite differences of a tiny model's loss.

#include <algorithm>
#include <cmath>

#include "tests/catch.h"
#include "tests/model/tiny_model.h"

namespace nrl::test {

/// Requires the gradients to be the derivatives of the loss. The model must have the reference's kernels.
inline void require_derivatives(TinyModel& model) {
  model.gradients();
  const auto analytic = model.gradients_;
  const bool train = model.needs_training();
  for (size_t p = 0; p < analytic.size(); ++p) {
    INFO(model.parameters_.all[p].name);
    // The element with the largest gradient, and one more.
    const auto& g = analytic[p];
    const size_t largest = static_cast<size_t>(
        std::max_element(g.begin(), g.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }) -
        g.begin());
    REQUIRE(g[largest] != 0);
    for (size_t i : {largest, g.size() / 3}) {
      float& w = model.weights_[p][i];
      const float kept = w;
      const float h = 1.0f / 256;
      double at[4];
      const float steps[4] = {-2 * h, -h, h, 2 * h};
      for (int s = 0; s < 4; ++s) {
        w = kept + steps[s];
        at[s] = model.loss(train);  // else the same number, and no backward pass
      }
      w = kept;
      const double numeric = (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * static_cast<double>(h));
      // Activations are stored in f32: rounding of about 1e-6 of the loss, divided by h.
      const double tolerance = 2e-3 * std::abs(static_cast<double>(g[largest])) + 1e-3;
      INFO("element " << i << " analytic " << g[i] << " numeric " << numeric);
      REQUIRE(std::abs(numeric - static_cast<double>(g[i])) < tolerance);
    }
  }
}

}  // namespace nrl::test
