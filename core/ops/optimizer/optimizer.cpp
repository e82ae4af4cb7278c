#include "core/ops/optimizer.h"

#include <algorithm>

#include "core/device/runtime.h"
#include "core/ops/kernel_table.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/scratch.h"
#include "core/ops/step.h"
#include "core/trace/trace.h"

namespace nrl::ops {
namespace {

void check_flat(const char* op, const char* name, const Tensor& t) {
  NRL_CHECK((t.data || t.numel() == 0) && is_float(t) && t.contiguous(),
            "{}: {} is {}, wanted contiguous f32 or bf16", op, name, describe(t));
}

}  // namespace

Cost cost(const Exec&, const AdamW& a) {
  // The elements of this call: with chunks those of the state, which may be a part of the flat buffers.
  const double updated = bytes_of(a.exp_avg), state = 2 * updated;
  const double copy = a.param_bf16 ? updated / 2 : 0;
  return {.read = 2 * updated + state + bytes_of(a.chunks, a.scalars), .written = updated + state + copy};
}

Cost cost(const Exec&, const SumOfSquares& a) {
  const auto blocks = static_cast<double>((a.x.numel() + norm_block - 1) / norm_block);
  return {.read = bytes_of(a.x) + (a.accumulate ? bytes_of(a.out) : 0),
          .written = bytes_of(a.out),
          .scratch = 2 * blocks * sizeof(double),
          .launches = 2};
}

Cost cost(const Exec&, const DecideStep& a) {
  return {.read = bytes_of(a.scalars), .written = bytes_of(a.scalars)};
}

Cost cost(const Exec&, const AddSum& a) {
  return {.read = bytes_of(a.x, a.out), .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const Convert& a) {
  return {.read = bytes_of(a.x), .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const SumParts& a) {
  return {.read = bytes_of(a.x) + (a.accumulate ? bytes_of(a.out) : 0), .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const Zero& a) {
  return {.written = bytes_of(a.x)};
}

void adamw(Exec& exec, const AdamW& a) {
  if (noted(exec, Kernel::adamw, a)) return;
  // Without chunks all buffers are of one length. With chunks those of the state may be another rank's share.
  const int64_t flat = a.grad.numel(), state = a.chunks ? a.exp_avg.numel() : flat;
  auto check = [](const char* name, const Tensor& t, int64_t n, DType dtype) {
    NRL_CHECK(is_vector(t, n, dtype) || (n == 0 && t.numel() == 0), "adamw: {} is {}, wanted {}[{}]", name,
              describe(t), name_of(dtype), n);
  };
  check("grad", a.grad, flat, DType::f32);
  check("exp_avg", a.exp_avg, state, DType::f32);
  check("exp_avg_sq", a.exp_avg_sq, state, DType::f32);
  check("param", a.param, a.param_bf16 ? state : flat, DType::f32);
  if (a.param_bf16) check("param_bf16", a.param_bf16, flat, DType::bf16);
  NRL_CHECK(!a.chunks || (a.chunks.rank == 2 && a.chunks.dim(1) == 4 && a.chunks.dtype == DType::i64 &&
                          a.chunks.contiguous()),
            "adamw: chunks are {}, wanted i64 (C, 4)", describe(a.chunks));
  NRL_CHECK(!a.scalars || is_vector(a.scalars, StepScalar::count, DType::f64), "adamw: scalars are {}",
            describe(a.scalars));
  NRL_CHECK(
      (a.scalars || a.step >= 1) && a.beta1 >= 0 && a.beta1 < 1 && a.beta2 >= 0 && a.beta2 < 1 && a.eps >= 0,
      "adamw: step {}, betas {} {}, eps {}", a.step, a.beta1, a.beta2, a.eps);
  const trace::Range range("adamw");
  if (a.chunks ? a.chunks.dim(0) > 0 : flat > 0) exec.kernels->adamw(exec, a);
}

std::vector<int64_t> adamw_chunks(std::span<const AdamWRange> ranges) {
  std::vector<int64_t> table;
  for (const AdamWRange& r : ranges) {
    NRL_CHECK(r.flat >= 0 && r.state >= 0 && r.count >= 0 && r.rates >= 0 && r.rates < adamw_rates,
              "adamw_chunks: {} elements at {} and {} with rates {}", r.count, r.flat, r.state, r.rates);
    for (int64_t begin = 0; begin < r.count; begin += adamw_chunk) {
      const int64_t count = std::min(adamw_chunk, r.count - begin);
      table.insert(table.end(), {r.flat + begin, r.state + begin, count, r.rates});
    }
  }
  return table;
}

void add_sum_of_squares(Exec& exec, const SumOfSquares& a) {
  if (noted(exec, Kernel::add_sum_of_squares, a)) return;
  check_flat("add_sum_of_squares", "x", a.x);
  NRL_CHECK(is_vector(a.out, 1, DType::f64), "add_sum_of_squares: out is {}, wanted f64[1]", describe(a.out));
  const trace::Range range("add_sum_of_squares");
  if (a.x.numel() > 0) {
    exec.kernels->add_sum_of_squares(exec, a);
  } else if (!a.accumulate) {
    zero(exec, {.x = a.out});
  }
}

void decide_step(Exec& exec, const DecideStep& a) {
  if (noted(exec, Kernel::decide_step, a)) return;
  NRL_CHECK(is_vector(a.scalars, StepScalar::count, DType::f64), "decide_step: scalars are {}",
            describe(a.scalars));
  NRL_CHECK(a.max_norm >= 0 && a.beta1 >= 0 && a.beta1 < 1 && a.beta2 >= 0 && a.beta2 < 1,
            "decide_step: norm {}, betas {} {}", a.max_norm, a.beta1, a.beta2);
  const trace::Range range("decide_step");
  exec.kernels->decide_step(exec, a);
}

size_t sum_of_squares_workspace(int64_t n) {
  const int64_t blocks = (n + norm_block - 1) / norm_block;
  return scratch_bytes(blocks, sizeof(double)) + scratch_alignment;
}

void add_sum(Exec& exec, const AddSum& a) {
  if (noted(exec, Kernel::add_sum, a)) return;
  NRL_CHECK(is_vector(a.x, a.x.numel(), DType::f32) || a.x.numel() == 0, "add_sum: x is {}, wanted f32 (n)",
            describe(a.x));
  NRL_CHECK(is_vector(a.out, 1, DType::f64), "add_sum: out is {}, wanted f64[1]", describe(a.out));
  const trace::Range range("add_sum");
  if (a.x.numel() > 0) exec.kernels->add_sum(exec, a);
}

void convert(Exec& exec, const Convert& a) {
  if (noted(exec, Kernel::convert, a)) return;
  check_flat("convert", "x", a.x);
  check_flat("convert", "out", a.out);
  NRL_CHECK(a.x.numel() == a.out.numel() && same_or_disjoint(a.x, a.out), "convert: x is {}, out is {}",
            describe(a.x), describe(a.out));
  const trace::Range range("convert");
  if (a.x.numel() > 0) exec.kernels->convert(exec, a);
}

void sum_parts(Exec& exec, const SumParts& a) {
  if (noted(exec, Kernel::sum_parts, a)) return;
  check_flat("sum_parts", "x", a.x);
  check_flat("sum_parts", "out", a.out);
  NRL_CHECK(a.x.rank == 2 && a.x.dim(0) > 0 && is_vector(a.out, a.x.dim(1), DType::f32),
            "sum_parts: x is {}, out is {}", describe(a.x), describe(a.out));
  const trace::Range range("sum_parts");
  if (a.x.numel() > 0) exec.kernels->sum_parts(exec, a);
}

void zero(Exec& exec, const Zero& a) {
  if (exec.device && exec.needed) return note_call(exec, "zero", cost(exec, a));  // needs no kernel
  if (noted(exec, Kernel::zero, a)) return;
  NRL_CHECK((a.x.data || a.x.numel() == 0) && a.x.contiguous(), "zero: x is {}, wanted contiguous memory",
            describe(a.x));
  const trace::Range range("zero");
  if (a.x.numel() == 0) return;
  if (exec.device) {
    exec.device->fill(a.x.data, 0, static_cast<size_t>(a.x.bytes()), exec.stream);
  } else {
    exec.kernels->zero(exec, a);
  }
}

}  // namespace nrl::ops
