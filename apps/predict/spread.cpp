#include "apps/predict/spread.h"

#include <cmath>

namespace nrl::predict {
namespace {

double normal_cdf(double z) {
  return 0.5 * std::erfc(-z / std::sqrt(2.0));
}

}  // namespace

double expected_maximum(int n) {
  if (n <= 1) return 0;
  const double p = (n - 0.375) / (n + 0.25);
  double low = 0, high = 10;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (normal_cdf(middle) < p ? low : high) = middle;
  }
  return (low + high) / 2;
}

}  // namespace nrl::predict
