#include "apps/predict/goodput.h"

#include <cmath>
#include <limits>

namespace nrl::predict {

double goodput(double interval, const Interruptions& i) {
  if (std::isinf(i.mtbf)) return std::isinf(interval) ? 1 : interval / (interval + i.stall);
  const double retried = std::exp((i.restart + i.lag) / i.mtbf), segment = (interval + i.stall) / i.mtbf;
  const double elapsed = i.mtbf * retried * std::expm1(segment);
  return std::isinf(elapsed) ? 0 : interval / elapsed;
}

double best_interval(const Interruptions& i) {
  if (std::isinf(i.mtbf)) return std::numeric_limits<double>::infinity();
  // The function falls from d/M at 0 to minus infinity at M.
  double low = 0, high = 1;
  for (int k = 0; k < 100; ++k) {
    const double middle = (low + high) / 2;
    (std::log1p(-middle) + middle + i.stall / i.mtbf > 0 ? low : high) = middle;
  }
  return low * i.mtbf;
}

}  // namespace nrl::predict
