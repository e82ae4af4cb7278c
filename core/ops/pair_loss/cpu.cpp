// Losses of pairs on the CPU; formulas in core/ops/pair_loss.h. A microbatch has few pairs: one thread.

#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/pair_loss/terms.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

void pair_loss_kernel(Exec&, const PairLoss& a) {
  const double* sums = data_of<const double>(a.sums);
  const double* values = data_of<const double>(a.values);
  double* gradient = data_of<double>(a.gradient);
  double* metrics = data_of<double>(a.metrics);
  for (int64_t s = 0; s < a.sums.numel(); s += 2) {
    const pairs::Pair pair = pairs::evaluate(a.options, sums + s, values + s * PairValue::count);
    if (gradient) {
      gradient[s] = pair.chosen;
      gradient[s + 1] = pair.rejected;
    }
    if (!metrics) continue;
    for (int m = 0; m < PairMetric::count; ++m) metrics[m] += pair.metrics[m];
  }
}

}  // namespace

void fill_pair_loss(KernelTable& table) {
  table.pair_loss = pair_loss_kernel;
}

}  // namespace nrl::ops::NRL_ISA
