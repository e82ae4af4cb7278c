#pragma once
// Parts of the constructors of layers that begin or end a stack of blocks.

#include <initializer_list>
#include <vector>

#include "apps/model/layers/sublayer.h"

namespace nrl::model {

/// The parameters that the model has, of indices that may be -1.
inline std::vector<int> present(std::initializer_list<int> parameters) {
  std::vector<int> out;
  for (const int p : parameters)
    if (p >= 0) out.push_back(p);
  return out;
}

/// The gradient that a layer passes to the one `below`.
inline StreamGradient input_gradient(const LayerBuilder& b, const Ports& below) {
  StreamGradient d_x{b.gradient("d_x", b.spec.hidden, sequence_rows)};
  if (below.d_out_amax) d_x.amax = b.number("d_x amax");
  return d_x;
}

}  // namespace nrl::model
