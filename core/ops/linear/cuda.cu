// Linear layers on a GPU are GEMMs of a library (gpu.cpp). The kernels here compute the gradient of a bias,
//
//   out[c] (=, +=) = sum over rows r of x[r, c],
//
// in two passes: each block of the first sums a group of rows for a tile of columns into `partial`, the
// second adds the groups. Row groups depend on the shape and Exec::reduction_blocks only, so results
// are bitwise reproducible.

#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/linear/gpu.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/rows.cuh"
#include "core/ops/shared/scratch.h"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

/// A block's warps iterate over the rows of its group; each lane handles `width` neighboring columns.
constexpr int column_warps = 8;
/// Rows of a warp in flight.
constexpr int column_unroll = 8;

/// partial (groups, m): the sums over each group's rows. grid (column tiles, groups).
template <class T, int width>
__global__ void __launch_bounds__(column_warps* warp)
    column_partials_kernel(const T* __restrict__ x, int64_t stride, int64_t n, int64_t m,
                           float* __restrict__ partial) {
  NRL_SHARED(float, part, [column_warps][width * warp]);
  const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
  const int64_t begin = n * blockIdx.y / gridDim.y, end = n * (blockIdx.y + 1) / gridDim.y;
  const int64_t tile = int64_t{blockIdx.x} * width * warp, column = tile + lane * width;
  float sum[width] = {};
  if (column + width <= m) {
    const auto add = [&](const Pack<T, width>& pack) {
      float v[width];
      pack.get(v);
#pragma unroll
      for (int e = 0; e < width; ++e) sum[e] += v[e];
    };
    int64_t r = begin + w;
    for (; r + (column_unroll - 1) * column_warps < end; r += column_unroll * column_warps) {
      Pack<T, width> packs[column_unroll];
#pragma unroll
      for (int u = 0; u < column_unroll; ++u) packs[u].load(x + (r + u * column_warps) * stride + column);
#pragma unroll
      for (int u = 0; u < column_unroll; ++u) add(packs[u]);
    }
    for (; r < end; r += column_warps) {
      Pack<T, width> pack;
      pack.load(x + r * stride + column);
      add(pack);
    }
  } else {
    for (int64_t r = begin + w; r < end; r += column_warps)
#pragma unroll
      for (int e = 0; e < width; ++e)
        if (column + e < m) sum[e] += static_cast<float>(x[r * stride + column + e]);
  }
#pragma unroll
  for (int e = 0; e < width; ++e) part[w][e * warp + lane] = sum[e];
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < width * warp && tile + c < m; c += column_warps * warp) {
    const int place = c % width * warp + c / width;
    float total = part[0][place];
#pragma unroll
    for (int i = 1; i < column_warps; ++i) total += part[i][place];
    partial[blockIdx.y * m + tile + c] = total;
  }
}

/// The warps of a block iterate over the groups; each lane handles one column.
constexpr int total_warps = 8;

__global__ void __launch_bounds__(total_warps* warp)
    column_totals_kernel(const float* __restrict__ partial, int groups, int64_t m, float* __restrict__ out,
                         bool accumulate) {
  NRL_SHARED(float, part, [total_warps][warp]);
  const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
  const int64_t column = int64_t{blockIdx.x} * warp + lane;
  float sum = 0.0f;
  if (column < m) {
#pragma unroll 8
    for (int g = w; g < groups; g += total_warps) sum += partial[g * m + column];
  }
  part[w][lane] = sum;
  __syncthreads();
  if (w != 0 || column >= m) return;
#pragma unroll
  for (int i = 1; i < total_warps; ++i) sum += part[i][lane];
  out[column] = accumulate ? out[column] + sum : sum;
}

template <class T, int width>
void column_partials(Exec& exec, const ColumnSums& a, int64_t groups, float* partial) {
  const int64_t n = a.x.dim(0), m = a.x.dim(1), tiles = (m + width * warp - 1) / (width * warp);
  NRL_LAUNCH((column_partials_kernel<T, width>),
             dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(groups)), column_warps * warp, 0,
             exec.stream, static_cast<const T*>(a.x.data), a.x.stride[0], n, m, partial);
}

void column_sums_launch(Exec& exec, const ColumnSums& a) {
  const int64_t n = a.x.dim(0), m = a.x.dim(1);
  constexpr int64_t rows = column_warps * column_unroll;  // smaller groups cost more than they save
  const int64_t groups = min((n + rows - 1) / rows, column_sum_groups(m, exec.partials()));
  Scratch scratch("column_sums", exec.workspace);
  float* partial = scratch.floats(groups * m);
  const bool vectors = aligned16(a.x.data) && a.x.stride[0] * size_of(a.x.dtype) % 16 == 0;
  if (n > 0) {
    for_float_type(a.x.dtype, [&]<class T>() {
      vectors ? column_partials<T, per_pack<T>>(exec, a, groups, partial)
              : column_partials<T, 1>(exec, a, groups, partial);
    });
  }
  NRL_LAUNCH(column_totals_kernel, static_cast<unsigned>((m + warp - 1) / warp), total_warps * warp, 0,
             exec.stream, partial, static_cast<int>(groups), m, static_cast<float*>(a.out.data),
             a.accumulate);
}

}  // namespace

void fill_linear(KernelTable& table) {
  table.linear_forward = gpu::linear_forward;
  table.linear_backward_data = gpu::linear_backward_data;
  table.linear_backward_weight = gpu::linear_backward_weight;
  table.column_sums = column_sums_launch;
}

}  // namespace nrl::ops::NRL_GPU
