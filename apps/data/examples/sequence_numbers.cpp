#include "apps/data/examples/sequence_numbers.h"

#include <algorithm>

namespace nrl::data {

SequenceNumbers::SequenceNumbers(const Examples& examples, Kind kind)
    : kind_(kind), sequences_(examples.sequences_per_example()) {
  for (int64_t e = 0; e < examples.size(); ++e)
    for (int s = 0; s < sequences_; ++s)
      first_.push_back(
          first_.back() +
          (kind == Kind::one ? 1 : static_cast<size_t>(std::max(examples.length(e, s).tokens - 1, 1))));
  values_.resize(first_.back());
}

}  // namespace nrl::data
