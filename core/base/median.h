#pragma once

#include <algorithm>
#include <vector>

namespace nrl {

/// The median; of an even number of values, the mean of the two in the middle. There must be at least one
/// value.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

}  // namespace nrl
