// Losses of policies on the GPU; formulas in core/ops/policy_loss.h.
//
// rows_kernel  a row per thread and round; writes weight, entropy_weight (=) and, if there are metrics, the
//              block's sums (=, workspace)
// sums_kernel  one block; adds the sums of the blocks to the metrics (+=)

#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/policy_loss/terms.h"
#include "core/ops/shared/gpu/sums.cuh"
#include "core/ops/shared/scratch.h"

namespace nrl::ops::NRL_GPU {
namespace {

constexpr int threads = 256;

__global__ void __launch_bounds__(threads)
    rows_kernel(policy::Inputs inputs, int64_t n, float* __restrict__ weight,
                float* __restrict__ entropy_weight, double* __restrict__ partial) {
  double added[PolicyMetric::count] = {};
  for (int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x; i < n; i += int64_t{gridDim.x} * threads) {
    const policy::Row row = policy::evaluate(inputs, i);
    if (weight) weight[i] = static_cast<float>(row.weight);
    if (entropy_weight) entropy_weight[i] = static_cast<float>(row.entropy_weight);
#pragma unroll
    for (int m = 0; m < PolicyMetric::count; ++m) added[m] += row.metrics[m];
  }
  if (!partial) return;
#pragma unroll
  for (int m = 0; m < PolicyMetric::count; ++m) {
    const double sum = block_sum_double(added[m]);
    if (threadIdx.x == 0) partial[blockIdx.x * PolicyMetric::count + m] = sum;
  }
}

__global__ void __launch_bounds__(threads)
    sums_kernel(const double* __restrict__ partial, int blocks, double* metrics) {
  for (int m = 0; m < PolicyMetric::count; ++m) {
    double sum = 0;
    for (int b = static_cast<int>(threadIdx.x); b < blocks; b += threads)
      sum += partial[b * PolicyMetric::count + m];
    sum = block_sum_double(sum);
    if (threadIdx.x == 0) metrics[m] += sum;
  }
}

void policy_loss_launch(Exec& exec, const PolicyLoss& a) {
  const int64_t n = a.log_prob.numel(), needed = (n + threads - 1) / threads;
  const int blocks = static_cast<int>(needed < exec.partials() ? needed : exec.partials());
  double* partial = nullptr;
  if (a.metrics) {
    Scratch scratch("policy_loss", exec.workspace);
    partial = reinterpret_cast<double*>(
        scratch.bytes(static_cast<size_t>(blocks) * PolicyMetric::count * sizeof(double)));
  }
  NRL_LAUNCH(rows_kernel, static_cast<unsigned>(blocks), threads, 0, exec.stream, policy::Inputs(a), n,
             static_cast<float*>(a.weight.data), static_cast<float*>(a.entropy_weight.data), partial);
  if (partial)
    NRL_LAUNCH(sums_kernel, 1, threads, 0, exec.stream, partial, blocks,
               static_cast<double*>(a.metrics.data));
}

}  // namespace

void fill_policy_loss(KernelTable& table) {
  table.policy_loss = policy_loss_launch;
}

}  // namespace nrl::ops::NRL_GPU
