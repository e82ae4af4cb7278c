#include "apps/model/linear/tensor_parallel.h"

namespace nrl::model {

namespace {

/// Calls `gemm` for all `rows`: as they arrive in `gathered`, or if it is unset at once.
void multiply_rows(const Run& r, const CommOverlap& overlap, Slot gathered, const Tensor& rows,
                   const GemmOfRows& gemm) {
  if (gathered)
    multiply_gathered(r, overlap, gathered, rows, gemm);
  else
    gemm({.in = 0, .count = rows.dim(0), .out = 0});
}

}  // namespace

CommOverlap overlap_of(const LayerBuilder& b, bool overlaps) {
  return overlaps ? b.layout.overlap : CommOverlap{};
}

SplitRows::SplitRows(const LayerBuilder& b, Slot own, Slot d_own, const Boundary& boundary)
    : gather_(overlap_of(b, boundary.overlaps && !boundary.whole)),
      sum_(overlap_of(b, boundary.overlaps)),
      own_(own),
      d_own_(d_own),
      codes_(boundary.codes) {}

ColumnInput::ColumnInput(const LayerBuilder& b, Slot in, Slot d_in, const Boundary& boundary)
    : SplitRows(b, in, d_in, boundary), x(in), d_x(d_in) {
  if (!b.layout.sequence_parallel) return;
  if (!boundary.codes) x = b.activation("gathered", b.spec.hidden, token_rows, gather_rule);
  d_x = b.gradient("d_gathered", b.spec.hidden, token_rows);
}

void ColumnInput::gather(Run& r) const {
  if (gathers()) r.step("gather", reads(own_), writes(x), [&] { start_gather(r, gather_, own_, x); });
}

void ColumnInput::multiply(const Run& r, const Tensor& rows, const GemmOfRows& gemm) const {
  multiply_rows(r, gather_, gathers() ? x : codes_, rows, gemm);
}

void ColumnInput::gather_again(Run& r) const {
  if (gathers() && gather_.method != TpCommOverlap::none) r.wgrad("gather_again", reads(x), [] {});
}

void ColumnInput::reduce(const Run& r) const {
  comm::Handle sum =
      d_x.id != d_own_.id ? r.reduce_scatter_async(r[d_x], r[d_own_]) : r.all_reduce_async(r[d_own_]);
  if (overlaps())
    r.in_flight().add(d_own_, {std::move(sum)});
  else
    sum.wait();
}

void ColumnInput::finish_reduce(Run& r) const {
  if (overlaps()) r.dgrad("finish_reduce", reads(d_x, d_own_), writes(d_own_), [&] { wait_for(r, d_own_); });
}

RowOutput::RowOutput(const LayerBuilder& b, Slot out, Slot d_out, const Boundary& boundary)
    : SplitRows(b, out, d_out, boundary), partial(out), d_full(d_out) {
  if (!b.layout.sequence_parallel) return;
  partial = b.activation("partial output", b.spec.hidden, token_rows);
  if (!boundary.codes) d_full = b.gradient("gathered d_out", b.spec.hidden, token_rows);
}

void RowOutput::multiply(const Run& r, const GemmOfRows& gemm) const {
  multiply_and_sum(r, sum_, partial, own_, gemm);
}

void RowOutput::gather(Run& r) const {
  if (d_full.id != d_own_.id)
    r.dgrad("gather", reads(d_own_), writes(d_full), [&] { start_gather(r, gather_, d_own_, d_full); });
}

void RowOutput::multiply_gradient(const Run& r, const Tensor& rows, const GemmOfRows& gemm) const {
  multiply_rows(r, gather_, d_full.id != d_own_.id ? d_full : codes_, rows, gemm);
}

Tensor RowOutput::bias(const Run& r, int parameter) {
  return r.layout().tensor_rank == 0 ? r.weight(parameter) : Tensor{};
}

}  // namespace nrl::model
