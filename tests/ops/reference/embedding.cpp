#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

/// The row of the table that token r selects; -1: none.
int64_t row_of(const Tensor& table, const Tensor& ids, int64_t r, const std::optional<int64_t>& first_id) {
  const int64_t row = index(ids, r) - first_id.value_or(0);
  return !first_id || (row >= 0 && row < table.dim(0)) ? row : -1;
}

void forward(Exec&, const EmbeddingForward& a) {
  for (int64_t r = 0; r < a.out.dim(0); ++r) {
    const int64_t row = row_of(a.table, a.ids, r, a.first_id);
    for (int64_t i = 0; i < a.out.dim(1); ++i) {
      const double position = a.position_table ? load(a.position_table, index(a.positions, r), i) : 0.0;
      store(a.out, r, i, (row < 0 ? 0.0 : a.scale * load(a.table, row, i)) + position);
    }
  }
}

/// table[index] += scale * sum of the rows of dout that selected it, summed in double.
void scatter_add(const Tensor& table, const Tensor& ids, const std::optional<int64_t>& first_id,
                 const Tensor& dout, double scale) {
  const int64_t h = table.dim(1);
  std::vector<double> sums(static_cast<size_t>(table.dim(0) * h));
  for (int64_t r = 0; r < dout.dim(0); ++r) {
    const int64_t row = row_of(table, ids, r, first_id);
    for (int64_t i = 0; i < h && row >= 0; ++i) sums[row * h + i] += load(dout, r, i);
  }
  for (int64_t v = 0; v < table.dim(0); ++v) {
    for (int64_t i = 0; i < h; ++i) store(table, v, i, load(table, v, i) + scale * sums[v * h + i]);
  }
}

void backward(Exec&, const EmbeddingBackward& a) {
  scatter_add(a.dtable, a.ids, a.first_id, a.dout, a.scale);
  if (a.dposition_table) scatter_add(a.dposition_table, a.positions, {}, a.dout, 1);
}

}  // namespace

void fill_embedding(KernelTable& table) {
  table.embedding_forward = forward;
  table.embedding_backward = backward;
}

}  // namespace nrl::ops::reference
