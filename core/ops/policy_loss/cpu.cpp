// Losses of policies on the CPU; formulas in core/ops/policy_loss.h. Threads have blocks of rows, whose sums
// are added in the order of the blocks.

#include <algorithm>

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/policy_loss/terms.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

void policy_loss_kernel(Exec& exec, const PolicyLoss& a) {
  // A fixed number of block sums lives on the stack, so that nothing is allocated.
  constexpr int64_t block = 256, batch = 64;
  double sums[batch][PolicyMetric::count];
  const policy::Inputs inputs(a);
  float* weight = data_of<float>(a.weight);
  float* entropy_weight = data_of<float>(a.entropy_weight);
  double* metrics = data_of<double>(a.metrics);
  const int64_t n = a.log_prob.numel(), blocks = (n + block - 1) / block;
  for (int64_t base = 0; base < blocks; base += batch) {
    const int64_t count = std::min(batch, blocks - base);
    cpu::parallel_for(exec.threads, count, 2, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        std::fill_n(sums[b], static_cast<int>(PolicyMetric::count), 0.0);
        const int64_t first = (base + b) * block;
        for (int64_t i = first; i < std::min(first + block, n); ++i) {
          const policy::Row row = policy::evaluate(inputs, i);
          if (weight) weight[i] = static_cast<float>(row.weight);
          if (entropy_weight) entropy_weight[i] = static_cast<float>(row.entropy_weight);
          for (int m = 0; m < PolicyMetric::count; ++m) sums[b][m] += row.metrics[m];
        }
      }
    });
    if (!metrics) continue;
    for (int64_t b = 0; b < count; ++b)
      for (int m = 0; m < PolicyMetric::count; ++m) metrics[m] += sums[b][m];
  }
}

}  // namespace

void fill_policy_loss(KernelTable& table) {
  table.policy_loss = policy_loss_kernel;
}

}  // namespace nrl::ops::NRL_ISA
