// Losses of pairs on the GPU; formulas in core/ops/pair_loss.h.
//
// pairs_kernel  one block, a pair per thread and round; writes gradient (=), adds to the metrics (+=)

#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/pair_loss/terms.h"
#include "core/ops/shared/gpu/sums.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

constexpr int threads = 256;

/// With a number of blocks in its bounds ptxas takes the four registers more without which it spills.
__global__ void __launch_bounds__(threads, 2)
    pairs_kernel(PairLoss::Options options, const double* __restrict__ sums,
                 const double* __restrict__ values, int64_t pair_count, double* gradient, double* metrics) {
  for (int64_t first = 0; first < pair_count; first += threads) {
    const int64_t p = first + threadIdx.x;
    const bool real = p < pair_count;
    pairs::Pair pair;
    if (real) pair = pairs::evaluate(options, sums + 2 * p, values + 2 * p * PairValue::count);
    if (real && gradient) {
      gradient[2 * p] = pair.chosen;
      gradient[2 * p + 1] = pair.rejected;
    }
    if (!metrics) continue;
#pragma unroll
    for (int m = 0; m < PairMetric::count; ++m) {
      const double sum = block_sum_double(pair.metrics[m]);
      if (threadIdx.x == 0) metrics[m] += sum;
    }
  }
}

void pair_loss_launch(Exec& exec, const PairLoss& a) {
  NRL_LAUNCH(pairs_kernel, 1, threads, 0, exec.stream, a.options, static_cast<const double*>(a.sums.data),
             static_cast<const double*>(a.values.data), a.sums.numel() / 2,
             static_cast<double*>(a.gradient.data), static_cast<double*>(a.metrics.data));
}

}  // namespace

void fill_pair_loss(KernelTable& table) {
  table.pair_loss = pair_loss_launch;
}

}  // namespace nrl::ops::NRL_GPU
