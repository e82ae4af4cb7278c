#include "apps/model/layers/tensor_parallel.h"

namespace nrl::model {

namespace {

/// Calls `gemm` once, for all rows.
void multiply_all(const Tensor& rows, const GemmOfRows& gemm) {
  gemm({.in = 0, .count = rows.dim(0), .out = 0});
}

}  // namespace

parallel::GroupId microbatch_ranks(int tensor, int context) {
  // The lane of attention's exchange: gradients may be summed over the same ranks at the same time.
  return tensor > 1 && context == 1 ? parallel::group::tp : parallel::group::tp_cp.on_lane(2);
}

bool gathers_fp8(const ModelSpec& m, const ModelLayout& layout, const precision::Recipe& recipe, int layer,
                 precision::Gemm gemm) {
  using precision::Gemm, precision::Role;
  // With overlap a GEMM reads rows as they arrive.
  if (!layout.sequence_parallel || layout.overlap.method != TpCommOverlap::none) return false;
  // The transposed copy has other blocks, so that both copies would be gathered: no fewer bytes than bf16.
  const auto whole = [&](Role role) { return recipe.of(layer, gemm, role).scaling == Scaling::tensor; };
  switch (gemm) {
    case Gemm::qkv:
    case Gemm::mlp_in:
      return whole(Role::input);
    case Gemm::shared_in:  // the gate reads the rows themselves
      return whole(Role::input) && !m.moe.shared_gate;
    case Gemm::o_proj:  // as does the gradient of a bias
      return whole(Role::gradient) && !m.o_bias;
    case Gemm::mlp_out:
      return whole(Role::gradient) && !m.mlp_bias;
    case Gemm::shared_out:
      return whole(Role::gradient);
    default:
      return false;
  }
}

ColumnInput::ColumnInput(const ModelLayout& layout, const CommOverlap& overlap, const AddSlot& add, Slot in,
                         Slot d_in, int64_t hidden, DType in_type, DType d_in_type, bool codes)
    : x(in), d_x(d_in), overlap_(overlap), in_(in), d_in_(d_in) {
  if (!layout.sequence_parallel) return;
  if (!codes) x = add({.name = "gathered", .width = hidden, .dtype = in_type, .rules = gather_rule});
  d_x = add({.name = "d_gathered", .width = hidden, .dtype = d_in_type});
}

void ColumnInput::gather(Run& r) const {
  if (gathers()) r.step("gather", reads(in_), writes(x), [&] { start_gather(r, overlap_, in_, x); });
}

void ColumnInput::multiply(const Run& r, const Tensor& rows, const GemmOfRows& gemm) const {
  if (gathers())
    multiply_gathered(r, overlap_, x, rows, gemm);
  else
    multiply_all(rows, gemm);
}

void ColumnInput::gather_again(Run& r) const {
  if (gathers() && overlaps()) r.wgrad("gather_again", reads(x), [] {});
}

void ColumnInput::reduce(const Run& r) const {
  comm::Handle sum =
      d_x.id != d_in_.id ? r.reduce_scatter_async(r[d_x], r[d_in_]) : r.all_reduce_async(r[d_in_]);
  if (overlaps())
    r.in_flight().add(d_in_, {std::move(sum)});
  else
    sum.wait();
}

void ColumnInput::finish_reduce(Run& r) const {
  if (overlaps()) r.dgrad("finish_reduce", reads(d_x, d_in_), writes(d_in_), [&] { wait_for(r, d_in_); });
}

RowOutput::RowOutput(const ModelLayout& layout, const CommOverlap& overlap, const AddSlot& add, Slot out,
                     Slot d_out, int64_t hidden, DType out_type, DType d_out_type, bool codes)
    : partial(out), d_full(d_out), overlap_(overlap), out_(out), d_out_(d_out) {
  if (!layout.sequence_parallel) return;
  partial = add({.name = "partial output", .width = hidden, .dtype = out_type});
  if (!codes) d_full = add({.name = "gathered d_out", .width = hidden, .dtype = d_out_type});
}

void RowOutput::multiply(const Run& r, const GemmOfRows& gemm) const {
  multiply_and_sum(r, overlap_, partial, out_, gemm);
}

void RowOutput::gather(Run& r) const {
  if (d_full.id != d_out_.id)
    r.dgrad("gather", reads(d_out_), writes(d_full), [&] { start_gather(r, overlap_, d_out_, d_full); });
}

void RowOutput::multiply_gradient(const Run& r, const Tensor& rows, const GemmOfRows& gemm) const {
  if (d_full.id != d_out_.id)
    multiply_gathered(r, overlap_, d_full, rows, gemm);
  else
    multiply_all(rows, gemm);
}

Tensor RowOutput::bias(const Run& r, int parameter) {
  return r.layout().tensor_rank == 0 ? r.weight(parameter) : Tensor{};
}

}  // namespace nrl::model
