#include "core/base/step_times.h"

#include <algorithm>

#include "core/base/sample.h"

namespace nrl {
namespace {

constexpr double most_medians = 3;

}  // namespace

void StepTimes::add(double seconds) {
  seconds_.push_back(known() ? std::min(seconds, most_medians * median()) : seconds);
  if (seconds_.size() > history) seconds_.pop_front();
}

double StepTimes::median() const {
  return known() ? nrl::median({seconds_.begin(), seconds_.end()}) : 0;
}

double StepTimes::limit(double medians, double least) const {
  return std::max(least, medians * median());
}

}  // namespace nrl
