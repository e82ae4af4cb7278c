#include "core/ops/pair_loss.h"

#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {

Cost cost(const Exec&, const PairLoss& a) {
  return {.read = bytes_of(a.sums, a.values, a.metrics), .written = bytes_of(a.gradient, a.metrics)};
}

void pair_loss(Exec& exec, const PairLoss& a) {
  if (noted(exec, Kernel::pair_loss, a)) return;
  const int64_t segments = a.sums.numel();
  NRL_CHECK(segments % 2 == 0 && (segments == 0 || is_vector(a.sums, segments, DType::f64)),
            "pair_loss: sums are {}, wanted f64 of an even number of segments", describe(a.sums));
  NRL_CHECK(a.values.rank == 2 && a.values.dim(0) == segments && a.values.dim(1) == PairValue::count &&
                a.values.dtype == DType::f64 && a.values.contiguous() && (a.values.data || segments == 0),
            "pair_loss: values are {}, wanted f64[{}, {}]", describe(a.values), segments,
            static_cast<int>(PairValue::count));
  NRL_CHECK(!a.gradient || is_vector(a.gradient, segments, DType::f64), "pair_loss: gradient is {}",
            describe(a.gradient));
  NRL_CHECK(!a.metrics || is_vector(a.metrics, PairMetric::count, DType::f64), "pair_loss: metrics are {}",
            describe(a.metrics));
  const PairLoss::Options& o = a.options;
  NRL_CHECK(o.beta > 0 && o.label_smoothing >= 0 && o.label_smoothing < 0.5,
            "pair_loss: beta {}, label smoothing {}", o.beta, o.label_smoothing);
  const bool averages =
      o.type == PreferenceLoss::ipo || o.type == PreferenceLoss::simpo || o.type == PreferenceLoss::orpo;
  NRL_CHECK(o.average || !averages, "pair_loss: {} without averages", name_of(o.type));
  const trace::Range range = traced(exec, Kernel::pair_loss, a);
  if (segments > 0) exec.kernels->pair_loss(exec, a);
}

}  // namespace nrl::ops
