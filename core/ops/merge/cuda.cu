// Sums of parts on the GPU. add_rows_kernel: out = or += x; a thread has packs of E elements, the grid
// strides over all. merge_attention_kernel, for every query and head with m = max(lse, part_lse),
// a = exp(lse - m), b = exp(part_lse - m):
//
//   out = (a out + b part) / (a + b),  lse = m + log(a + b)
//
// `lanes_per_row` neighbors of a warp share the head of a query; the grid strides over all of them.

#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

constexpr int threads = 256;
/// Elements of a vectorized access: 16 bytes of bf16 or 32 of f32, because x and out may differ in type.
constexpr int pack_elements = 8;
constexpr int lanes_per_row = 8;

template <class X, class O>
struct AddArguments {
  const X* x;
  O* out;
  int64_t x_stride, out_stride;
  int64_t packs;  ///< of all rows
  Divider packs_per_row;
};

template <class X, class O, int E, bool accumulate>
__global__ void __launch_bounds__(threads) add_rows_kernel(AddArguments<X, O> a) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * threads;
  for (int64_t pack = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x; pack < a.packs;
       pack += stride) {
    const int64_t row = a.packs_per_row.quotient(pack), column = (pack - row * a.packs_per_row.divisor()) * E;
    float v[E];
    load_floats(a.x + row * a.x_stride + column, v);
    O* out = a.out + row * a.out_stride + column;
    if constexpr (accumulate) {
      float sum[E];
      load_floats(out, sum);
#pragma unroll
      for (int e = 0; e < E; ++e) v[e] += sum[e];
    }
    store_floats(out, v);
  }
}

template <class X, class O, int E>
void add_launch(Exec& exec, const AddRows& r) {
  AddArguments<X, O> a{};
  a.x = static_cast<const X*>(r.x.data);
  a.out = static_cast<O*>(r.out.data);
  a.x_stride = r.x.step(0);
  a.out_stride = r.out.step(0);
  a.packs_per_row = Divider(r.x.dim(1) / E);
  a.packs = r.x.dim(0) * (r.x.dim(1) / E);
  const unsigned grid = kernel::grid_for(a.packs, threads, exec.multiprocessors);
  if (r.accumulate)
    NRL_LAUNCH((add_rows_kernel<X, O, E, true>), grid, threads, 0, exec.stream, a);
  else
    NRL_LAUNCH((add_rows_kernel<X, O, E, false>), grid, threads, 0, exec.stream, a);
}

void add_rows_launch(Exec& exec, const AddRows& a) {
  const bool packed = packed_rows(a.x) && packed_rows(a.out) && a.x.dim(1) % pack_elements == 0;
  for_float_type(a.x.dtype, [&]<class X>() {
    for_float_type(a.out.dtype, [&]<class O>() {
      packed ? add_launch<X, O, pack_elements>(exec, a) : add_launch<X, O, 1>(exec, a);
    });
  });
}

template <class T>
struct MergeArguments {
  Rows<const T> part;
  Rows<float> out;  ///< rows are the heads of the queries
  const float* part_lse;
  float* lse;
  int64_t part_lse_stride, lse_stride;  ///< between heads
  int64_t rows;                         ///< queries * heads
  int d;
  Divider heads;
};

template <class T, int E>
__global__ void __launch_bounds__(threads) merge_attention_kernel(MergeArguments<T> a) {
  constexpr int rows_per_block = threads / lanes_per_row;
  const int lane = static_cast<int>(threadIdx.x) % lanes_per_row;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * rows_per_block;
  // The bound applies to the warp's first row, so that all lanes of a warp reach the barrier.
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * rows_per_block + threadIdx.x / lanes_per_row;
       row - threadIdx.x % kernel::warp / lanes_per_row < a.rows; row += stride) {
    const bool real = row < a.rows;
    const int64_t query = a.heads.quotient(row), head = row - query * a.heads.divisor();
    const float part_lse = real ? a.part_lse[head * a.part_lse_stride + query] : -INFINITY,
                lse = real ? a.lse[head * a.lse_stride + query] : 0.0f;
    __syncwarp();  // the first lane overwrites lse
    if (part_lse == -INFINITY) continue;
    const float m = fmaxf(lse, part_lse), old_weight = expf(lse - m), new_weight = expf(part_lse - m),
                sum = old_weight + new_weight, keep = old_weight / sum, take = new_weight / sum;
    const T* part = a.part[row];
    float* out = a.out[row];
    for (int i = lane * E; i < a.d; i += lanes_per_row * E) {
      float u[E], v[E];
      load_floats(part + i, u);
      load_floats(out + i, v);
#pragma unroll
      for (int e = 0; e < E; ++e) v[e] = v[e] * keep + u[e] * take;
      store_floats(out + i, v);
    }
    if (lane == 0) a.lse[head * a.lse_stride + query] = m + logf(sum);
  }
}

template <class T, int E>
void merge_launch(Exec& exec, const MergeAttention& m) {
  MergeArguments<T> a{};
  a.part = Rows<const T>(m.part);
  a.out = Rows<float>(m.out);
  a.part_lse = static_cast<const float*>(m.part_lse.data);
  a.lse = static_cast<float*>(m.lse.data);
  a.part_lse_stride = m.part_lse.step(0);
  a.lse_stride = m.lse.step(0);
  a.rows = m.part.dim(0) * m.part.dim(1);
  a.d = static_cast<int>(m.part.dim(2));
  a.heads = Divider(m.part.dim(1));
  const unsigned grid = kernel::grid_for(a.rows, threads / lanes_per_row, exec.multiprocessors);
  NRL_LAUNCH((merge_attention_kernel<T, E>), grid, threads, 0, exec.stream, a);
}

void merge_attention_launch(Exec& exec, const MergeAttention& a) {
  const bool packed = packed_rows(a.part) && packed_rows(a.out) && a.part.dim(2) % pack_elements == 0;
  for_float_type(a.part.dtype, [&]<class T>() {
    packed ? merge_launch<T, pack_elements>(exec, a) : merge_launch<T, 1>(exec, a);
  });
}

}  // namespace

void fill_merge(KernelTable& table) {
  table.add_rows = add_rows_launch;
  table.merge_attention = merge_attention_launch;
}

}  // namespace nrl::ops::NRL_GPU
