#include "apps/planner/predicted_power.h"

#include <algorithm>

namespace nrl::planner {
namespace {

double watts_of(const predict::PowerModel& power, const predict::WorkSpan& w) {
  using Resource = predict::Span::Resource;
  if (w.span.resource == Resource::waits || w.span.link == machine::Link::host) return power.idle;
  if (w.span.resource != Resource::processors || !w.call) return power.links;
  switch (w.call->cost.work) {
    case ops::Work::gemm:
      return power.gemm;
    case ops::Work::attention:
      return power.attention;
    case ops::Work::memory:
      break;
  }
  return power.memory;
}

}  // namespace

std::vector<double> predicted_power(const predict::PowerModel& power, const predict::StageTimeline& stage,
                                    double end, size_t parts) {
  if (power.limit <= 0 || stage.work.empty() || !(end > 0)) return {};
  const double each = end / static_cast<double>(parts);
  std::vector<double> out(parts, 0);  // joules above idle at first
  for (const predict::WorkSpan& w : stage.work) {
    const double above = watts_of(power, w) - power.idle;
    const auto first = static_cast<size_t>(std::max(w.span.begin / each, 0.0));
    for (size_t i = first; i < parts && static_cast<double>(i) * each < w.span.end; ++i) {
      const double begin = std::max(w.span.begin, static_cast<double>(i) * each),
                   until = std::min(w.span.end, static_cast<double>(i + 1) * each);
      out[i] += above * std::max(until - begin, 0.0);
    }
  }
  for (double& x : out) x = power.idle + std::min(x / each, power.limit - power.idle);
  return out;
}

}  // namespace nrl::planner
