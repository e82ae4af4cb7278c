// Dropout on the GPU: out = keep(element) ? x / (1 - p) : 0, + residual; writes (=) out. The mask is a
// function of the global element (DropoutMask). A thread has `unroll` packs of E elements (16 bytes).

#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/dropout_mask.cuh"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

constexpr int threads = 256;

template <class T>
struct DropoutArguments {
  const T *x, *residual;  ///< residual may be null
  T* out;
  int64_t x_stride, residual_stride, out_stride;
  int64_t width, first_column;  ///< of the mask's rows
  int64_t first_row;            ///< global, of row 0
  const int* rows;              ///< instead of 0, 1, ...; may be null
  int packs;                    ///< of all rows
  Divider packs_per_row;
  DropoutMask mask;
};

/// Packs of a thread.
constexpr int unroll = 2;

template <class T, int E>
__global__ void __launch_bounds__(threads, 5) dropout_kernel(DropoutArguments<T> a) {
  const uint64_t stream = a.mask.stream();
  const int first = static_cast<int>(blockIdx.x) * threads * unroll + static_cast<int>(threadIdx.x);
  Pack<T, E> packs[unroll], residuals[unroll];
  int row[unroll], column[unroll];
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const int index = first + u * threads;
    if (index >= a.packs) continue;
    row[u] = static_cast<int>(a.packs_per_row.short_quotient(static_cast<unsigned>(index)));
    column[u] = (index - row[u] * static_cast<int>(a.packs_per_row.divisor())) * E;
    packs[u].load(a.x + row[u] * a.x_stride + column[u]);
    if (a.residual) residuals[u].load(a.residual + row[u] * a.residual_stride + column[u]);
  }
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    if (first + u * threads >= a.packs) break;
    float v[E];
    packs[u].get(v);
    a.mask.apply(
        stream, (a.first_row + (a.rows ? a.rows[row[u]] : row[u])) * a.width + a.first_column + column[u], v);
    if (a.residual) {
      float added[E];
      residuals[u].get(added);
#pragma unroll
      for (int e = 0; e < E; ++e) v[e] += added[e];
    }
    packs[u].set(v);
    packs[u].store(a.out + row[u] * a.out_stride + column[u]);
  }
}

template <class T, int E>
void launch(Exec& exec, const Dropout& d) {
  DropoutArguments<T> a{};
  a.x = static_cast<const T*>(d.x.data);
  a.residual = static_cast<const T*>(d.residual.data);
  a.residual_stride = d.residual ? d.residual.step(0) : 0;
  a.out = static_cast<T*>(d.out.data);
  a.x_stride = d.x.step(0);
  a.out_stride = d.out.step(0);
  const int64_t columns = d.x.dim(1);
  a.width = d.width > 0 ? d.width : columns;
  a.first_column = d.first_column;
  a.first_row = d.first_row;
  a.rows = static_cast<const int*>(d.rows.data);
  a.packs_per_row = Divider(columns / E);
  const int64_t packs = d.x.dim(0) * (columns / E);
  a.packs = static_cast<int>(packs);
  a.mask = DropoutMask(d.p, d.seed, d.stream, d.step);
  NRL_LAUNCH((dropout_kernel<T, E>), kernel::blocks_for(packs, threads * unroll), threads, 0, exec.stream, a);
}

void dropout_launch(Exec& exec, const Dropout& d) {
  const bool packed = packed_rows(d.x) && packed_rows(d.residual) && packed_rows(d.out) && d.width % 4 == 0 &&
                      d.first_column % 4 == 0;
  for_float_type(d.x.dtype,
                 [&]<class T>() { packed ? launch<T, per_pack<T>>(exec, d) : launch<T, 1>(exec, d); });
}

}  // namespace

void fill_dropout(KernelTable& table) {
  table.dropout = dropout_launch;
}

}  // namespace nrl::ops::NRL_GPU
