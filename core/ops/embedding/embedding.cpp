#include "core/ops/embedding.h"

#include "core/ops/embedding/sorted.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/scratch.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

bool is_matrix(const Tensor& t) {
  return t.data && t.rank == 2 && is_float(t) && dense_rows(t);
}

/// One table (forward or gradient) and the indices that select its rows, against the (N, H) side.
void check_table(const char* op, const Tensor& table, const Tensor& ids, const Tensor& rows) {
  NRL_CHECK(is_matrix(rows), "{}: rows are {}, wanted f32, bf16 or f16 (N, H)", op, describe(rows));
  NRL_CHECK(is_matrix(table) && table.dim(1) == rows.dim(1), "{}: table is {}, rows are {}", op,
            describe(table), describe(rows));
  NRL_CHECK(is_vector(ids, rows.dim(0), DType::i32), "{}: ids are {}, rows are {}", op, describe(ids),
            describe(rows));
}

/// Bytes of the rows of a table that the ids select, each once.
double selected_bytes(const Tensor& table, const Tensor& ids) {
  if (!table) return 0;
  return static_cast<double>(std::min(table.dim(0), ids.dim(0)) * table.dim(1) * size_of(table.dtype));
}

}  // namespace

Cost cost(const Exec&, const EmbeddingForward& a) {
  return {
      .read = bytes_of(a.ids) + selected_bytes(a.table, a.ids) +
              (a.position_table ? bytes_of(a.positions) + selected_bytes(a.position_table, a.positions) : 0),
      .written = bytes_of(a.out)};
}

Cost cost(const Exec& exec, const EmbeddingBackward& a) {
  const int tables = a.dposition_table ? 2 : 1;
  const double rows = selected_bytes(a.dtable, a.ids) + selected_bytes(a.dposition_table, a.positions);
  // A GPU sorts the tokens by id first: little traffic, but three kernels per pass.
  const auto kernels = [&](const Tensor& table, bool slice) {
    return !table ? 0 : exec.device ? 3 * sorted::passes_of(table.dim(0) - (slice ? 0 : 1)) + 2 : 1;
  };
  return {
      .read = tables * bytes_of(a.dout) + bytes_of(a.ids) + (tables == 2 ? bytes_of(a.positions) : 0) + rows,
      .written = rows,
      .launches = kernels(a.dtable, a.first_id.has_value()) + kernels(a.dposition_table, false)};
}

void embedding_forward(Exec& exec, const EmbeddingForward& a) {
  if (noted(exec, Kernel::embedding_forward, a)) return;
  constexpr const char* op = "embedding_forward";
  check_table(op, a.table, a.ids, a.out);
  NRL_CHECK(are_float_pair(a.table, a.out), "{}: table is {}, rows are {}: wanted both in f16 or neither", op,
            describe(a.table), describe(a.out));
  if (a.position_table) {
    check_table(op, a.position_table, a.positions, a.out);
    NRL_CHECK(a.position_table.dtype == a.table.dtype, "{}: table is {}, position_table is {}", op,
              describe(a.table), describe(a.position_table));
  }
  const trace::Range range = traced(exec, Kernel::embedding_forward, a);
  if (a.out.numel() > 0) exec.kernels->embedding_forward(exec, a);
}

void embedding_backward(Exec& exec, const EmbeddingBackward& a) {
  if (noted(exec, Kernel::embedding_backward, a)) return;
  constexpr const char* op = "embedding_backward";
  check_table(op, a.dtable, a.ids, a.dout);
  NRL_CHECK(a.dtable.dtype == DType::f32, "{}: dtable is {}, wanted f32", op, describe(a.dtable));
  if (a.dposition_table) {
    check_table(op, a.dposition_table, a.positions, a.dout);
    NRL_CHECK(a.dposition_table.dtype == DType::f32, "{}: dposition_table is {}, wanted f32", op,
              describe(a.dposition_table));
  }
  const trace::Range range = traced(exec, Kernel::embedding_backward, a);
  if (a.dout.numel() > 0) exec.kernels->embedding_backward(exec, a);
}

size_t workspace(const Exec& exec, const EmbeddingBackward& a) {
  return exec.on_gpu() ? embedding_backward_workspace(a.dout.dim(0), a.dout.dim(1)) : 0;
}

size_t embedding_backward_workspace(int64_t tokens, int64_t hidden) {
  // Keys and tokens before and after a pass, counts, partial sums.
  return 4 * scratch_bytes(tokens) + scratch_bytes(sorted::digits * sorted::tiles_of(tokens)) +
         scratch_bytes(2 * sorted::groups_of(tokens) * hidden) + scratch_alignment;
}

}  // namespace nrl::ops
