// Token and position embeddings on the CPU.
//   forward:  out[n] = scale * table[ids[n]] + position_table[positions[n]], tokens split over the threads
//   backward: dtable[ids[n]] += scale * dout[n] for all n in order, columns split over the threads
// With first_id the table has the rows of ids from there on; ids outside of it select none.

#include "core/device/cpu/parallel.h"
#include "core/ops/embedding.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t grain_elements = 16384;

/// Row r of the table, of those that `ids` select; null for an id outside of a slice.
template <class W>
W* row_of(const Tensor& table, const int32_t* ids, int64_t r, const std::optional<int64_t>& first_id) {
  const int64_t row = ids[r] - first_id.value_or(0);
  if (first_id && (row < 0 || row >= table.dim(0))) return nullptr;
  return data_of<W>(table) + row * table.stride[0];
}

template <class W, class T>
void forward(Exec& exec, const EmbeddingForward& a) {
  const int64_t n = a.out.dim(0), h = a.out.dim(1);
  const int32_t* ids = data_of<const int32_t>(a.ids);
  const int32_t* positions = data_of<const int32_t>(a.positions);
  cpu::parallel_for(
      exec.threads, n, std::max<int64_t>(1, grain_elements / h), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          T* out = data_of<T>(a.out) + r * a.out.stride[0];
          const W* row = row_of<const W>(a.table, ids, r, a.first_id);
          const W* position_row =
              a.position_table ? row_of<const W>(a.position_table, positions, r, {}) : nullptr;
          const float scale = row ? a.scale : 1.0f;
          if (!row) std::swap(row, position_row);
          if (!row) {
            std::fill(out, out + h, T());
          } else if (position_row) {
            for_lanes(h, [=](int64_t i, auto part) {
              part.store(out + i, part.load(row + i) * scale + part.load(position_row + i));
            });
          } else {
            for_lanes(h, [=](int64_t i, auto part) { part.store(out + i, part.load(row + i) * scale); });
          }
        }
      });
}

/// table[index[r], begin..end) += scale * dout[r, begin..end) for all rows in order.
template <class T>
void scatter_add(const Tensor& table, const Tensor& index, const std::optional<int64_t>& first_id,
                 const Tensor& dout, float scale, int64_t begin, int64_t end) {
  const int32_t* ids = data_of<const int32_t>(index);
  for (int64_t r = 0; r < dout.dim(0); ++r) {
    float* row = row_of<float>(table, ids, r, first_id);
    if (!row) continue;
    const T* g = data_of<const T>(dout) + r * dout.stride[0];
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) row[i] += scale * static_cast<float>(g[i]);
  }
}

template <class T>
void backward(Exec& exec, const EmbeddingBackward& a) {
  const int64_t n = a.dout.dim(0), h = a.dout.dim(1);
  constexpr int64_t line = 16;  // columns of one cache line of dtable, so that threads do not share lines
  const int64_t grain = std::max<int64_t>(4, grain_elements / (n * line));
  cpu::parallel_for(exec.threads, (h + line - 1) / line, grain, [&](int64_t begin, int64_t end) {
    scatter_add<T>(a.dtable, a.ids, a.first_id, a.dout, a.scale, begin * line, std::min(h, end * line));
    if (a.dposition_table)
      scatter_add<T>(a.dposition_table, a.positions, {}, a.dout, 1.0f, begin * line, std::min(h, end * line));
  });
}

void embedding_forward_kernel(Exec& exec, const EmbeddingForward& a) {
  for_float_pair(a.table.dtype, a.out.dtype, [&]<class W, class T>() { forward<W, T>(exec, a); });
}

void embedding_backward_kernel(Exec& exec, const EmbeddingBackward& a) {
  for_float_type(a.dout.dtype, [&]<class T>() { backward<T>(exec, a); });
}

}  // namespace

void fill_embedding(KernelTable& table) {
  table.embedding_forward = embedding_forward_kernel;
  table.embedding_backward = embedding_backward_kernel;
}

}  // namespace nrl::ops::NRL_ISA
