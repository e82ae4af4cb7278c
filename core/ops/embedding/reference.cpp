#include "core/ops/shared/reference.h"

namespace nrl::ops::reference {
namespace {

void forward(Exec&, const EmbeddingForward& a) {
  for (int64_t r = 0; r < a.out.dim(0); ++r) {
    for (int64_t i = 0; i < a.out.dim(1); ++i) {
      const double position = a.position_table ? load(a.position_table, index(a.positions, r), i) : 0.0;
      store(a.out, r, i, load(a.table, index(a.ids, r), i) + position);
    }
  }
}

/// table[index] += sum of the rows of dout that selected it, summed in double.
void scatter_add(const Tensor& table, const Tensor& ids, const Tensor& dout) {
  const int64_t h = table.dim(1);
  std::vector<double> sums(static_cast<size_t>(table.dim(0) * h));
  for (int64_t r = 0; r < dout.dim(0); ++r) {
    for (int64_t i = 0; i < h; ++i) sums[static_cast<size_t>(index(ids, r) * h + i)] += load(dout, r, i);
  }
  for (int64_t v = 0; v < table.dim(0); ++v) {
    for (int64_t i = 0; i < h; ++i)
      store(table, v, i, load(table, v, i) + sums[static_cast<size_t>(v * h + i)]);
  }
}

void backward(Exec&, const EmbeddingBackward& a) {
  scatter_add(a.dtable, a.ids, a.dout);
  if (a.dposition_table) scatter_add(a.dposition_table, a.positions, a.dout);
}

}  // namespace

void fill_embedding(KernelTable& table) {
  table.embedding_forward = forward;
  table.embedding_backward = backward;
}

}  // namespace nrl::ops::reference
