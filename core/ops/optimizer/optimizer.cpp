#include "core/ops/optimizer.h"

#include <algorithm>

#include "core/device/runtime.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/moments.h"
#include "core/ops/shared/scratch.h"
#include "core/ops/step.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

void check_flat(const char* op, const char* name, const Tensor& t) {
  NRL_CHECK((t.data || t.numel() == 0) && is_f32_or_bf16(t) && t.contiguous(),
            "{}: {} is {}, wanted contiguous f32 or bf16", op, name, describe(t));
}

}  // namespace

Cost cost(const Exec&, const AdamW& a) {
  // With chunks a call updates the elements of the state, which may be a part of the flat buffers.
  const auto updated = static_cast<double>(a.exp_avg.numel());
  const double state = bytes_of(a.exp_avg, a.exp_avg_sq, a.exp_avg_scales, a.exp_avg_sq_scales, a.remainder);
  const double copy = a.param_bf16 ? 2 * updated : 0, param = a.param ? 4 * updated : 0;
  const double read_copy = a.param ? 0 : copy;
  const double gradients = static_cast<double>(size_of(a.grad.dtype)) * updated;
  return {.read = gradients + param + read_copy + state + bytes_of(a.chunks, a.scalars),
          .written = param + copy + state};
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
  // Without chunks all buffers have one length. With chunks the state buffers may hold only a rank's share.
  const int64_t flat = a.grad.numel(), state = a.chunks ? a.exp_avg.numel() : flat;
  auto check = [](const char* name, const Tensor& t, int64_t n, DType dtype) {
    NRL_CHECK(is_vector(t, n, dtype) || (n == 0 && t.numel() == 0), "adamw: {} is {}, wanted {}[{}]", name,
              describe(t), name_of(dtype), n);
  };
  NRL_CHECK(is_f32_or_bf16(a.grad), "adamw: grad is {}, wanted f32 or bf16", describe(a.grad));
  check("grad", a.grad, flat, a.grad.dtype);
  auto check_moment = [&](const char* name, const Tensor& t, const Tensor& scales) {
    NRL_CHECK(t.dtype == DType::f32 || t.dtype == DType::bf16 || has_moment_scales(t.dtype),
              "adamw: {} is {}, wanted f32, bf16, f16 or e4m3", name, describe(t));
    check(name, t, state, t.dtype);
    NRL_CHECK(has_moment_scales(t.dtype) ? is_vector(scales, moment_blocks(state), DType::u8) : !scales,
              "adamw: {} is {}, its scales are {}", name, describe(t), describe(scales));
  };
  check_moment("exp_avg", a.exp_avg, a.exp_avg_scales);
  check_moment("exp_avg_sq", a.exp_avg_sq, a.exp_avg_sq_scales);
  const bool f16_copy = a.param_bf16.dtype == DType::f16;
  if (a.param_bf16) check("param_bf16", a.param_bf16, flat, f16_copy ? DType::f16 : DType::bf16);
  if (a.remainder) {
    check("remainder", a.remainder, state, DType::u16);
    NRL_CHECK(!a.param && a.param_bf16 && !f16_copy,
              "adamw: a remainder needs param_bf16 of bf16 and no param");
  } else if (a.param || state == 0) {
    check("param", a.param, a.param_bf16 ? state : flat, DType::f32);
  } else {
    NRL_CHECK(a.param_bf16 && !f16_copy, "adamw: no param, and param_bf16 is {}, wanted bf16",
              describe(a.param_bf16));
  }
  NRL_CHECK(!a.chunks || (a.chunks.rank == 2 && a.chunks.dim(1) == 4 && a.chunks.dtype == DType::i64 &&
                          a.chunks.contiguous()),
            "adamw: chunks are {}, wanted i64 (C, 4)", describe(a.chunks));
  NRL_CHECK(!a.scalars || is_vector(a.scalars, StepScalar::count, DType::f64), "adamw: scalars are {}",
            describe(a.scalars));
  NRL_CHECK(
      (a.scalars || a.step >= 1) && a.beta1 >= 0 && a.beta1 < 1 && a.beta2 >= 0 && a.beta2 < 1 && a.eps >= 0,
      "adamw: step {}, betas {} {}, eps {}", a.step, a.beta1, a.beta2, a.eps);
  const trace::Range range = traced(exec, Kernel::adamw, a);
  if (a.chunks ? a.chunks.dim(0) > 0 : flat > 0) exec.kernels->adamw(exec, a);
}

int64_t adamw_chunk_count(std::span<const AdamWRange> ranges) {
  int64_t chunks = 0;
  for (const AdamWRange& r : ranges) chunks += (r.count + adamw_chunk - 1) / adamw_chunk;
  return chunks;
}

std::vector<int64_t> adamw_chunks(std::span<const AdamWRange> ranges) {
  std::vector<int64_t> table;
  table.reserve(4 * static_cast<size_t>(adamw_chunk_count(ranges)));
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

namespace {

template <DType format, class Code>
void decode_as(const Code* codes, const uint8_t* scales, int64_t skip, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = moments::decode<format>(codes[i]) * fp8::scale_value(scales[(skip + i) / moment_block]);
}

template <DType format, class Code>
void encode_as(const float* x, int64_t n, Code* codes, uint8_t* scales) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t largest = 0;
    const int64_t end = std::min(n, (i / moment_block + 1) * moment_block);
    if (i % moment_block == 0) {
      for (int64_t k = i; k < end; ++k)
        largest = std::max(largest, moments::bits_of(x[k]) & fp8::magnitude_bits);
      scales[i / moment_block] = static_cast<uint8_t>(fp8::scale_of<format>(largest));
    }
    const float scaled = x[i] * fp8::inverse_scale(scales[i / moment_block]);
    codes[i] = static_cast<Code>(moments::encode<format>(scaled, moments::to_nearest, false));
  }
}

}  // namespace

void decode_moments(DType dtype, const void* values, const uint8_t* scales, int64_t skip, int64_t n,
                    float* out) {
  switch (dtype) {
    case DType::f16:
      return decode_as<DType::f16>(static_cast<const uint16_t*>(values), scales, skip, n, out);
    case DType::e4m3:
      return decode_as<DType::e4m3>(static_cast<const uint8_t*>(values), scales, skip, n, out);
    case DType::bf16:
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<const bf16*>(values)[i];
      return;
    default:
      NRL_CHECK(dtype == DType::f32, "optimizer state in {}", name_of(dtype));
      std::copy_n(static_cast<const float*>(values), n, out);
  }
}

void encode_moments(DType dtype, const float* x, int64_t n, void* values, uint8_t* scales) {
  switch (dtype) {
    case DType::f16:
      return encode_as<DType::f16>(x, n, static_cast<uint16_t*>(values), scales);
    case DType::e4m3:
      return encode_as<DType::e4m3>(x, n, static_cast<uint8_t*>(values), scales);
    case DType::bf16:
      for (int64_t i = 0; i < n; ++i)
        static_cast<uint16_t*>(values)[i] =
            static_cast<uint16_t>(moments::encode_bf16(x[i], moments::to_nearest));
      return;
    default:
      NRL_CHECK(dtype == DType::f32, "optimizer state in {}", name_of(dtype));
      std::copy_n(x, n, static_cast<float*>(values));
  }
}

void join_master(const bf16* weights, const uint16_t* remainder, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = moments::join({weights[i].bits, remainder[i]});
}

void split_master(const float* master, int64_t n, uint16_t* remainder) {
  for (int64_t i = 0; i < n; ++i) remainder[i] = moments::split(master[i]).low;
}

void add_sum_of_squares(Exec& exec, const SumOfSquares& a) {
  if (noted(exec, Kernel::add_sum_of_squares, a)) return;
  check_flat("add_sum_of_squares", "x", a.x);
  NRL_CHECK(is_vector(a.out, 1, DType::f64), "add_sum_of_squares: out is {}, wanted f64[1]", describe(a.out));
  const trace::Range range = traced(exec, Kernel::add_sum_of_squares, a);
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
  const trace::Range range = traced(exec, Kernel::decide_step, a);
  exec.kernels->decide_step(exec, a);
}

size_t workspace(const Exec& exec, const SumOfSquares& a) {
  return exec.on_gpu() ? sum_of_squares_workspace(a.x.numel()) : 0;
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
  const trace::Range range = traced(exec, Kernel::add_sum, a);
  if (a.x.numel() > 0) exec.kernels->add_sum(exec, a);
}

void convert(Exec& exec, const Convert& a) {
  if (noted(exec, Kernel::convert, a)) return;
  for (const Tensor* t : {&a.x, &a.out})
    NRL_CHECK((t->data || t->numel() == 0) && is_float(*t) && t->contiguous(),
              "convert: {}, wanted contiguous f32, bf16 or f16", describe(*t));
  NRL_CHECK(a.x.numel() == a.out.numel() && same_or_disjoint(a.x, a.out), "convert: x is {}, out is {}",
            describe(a.x), describe(a.out));
  const trace::Range range = traced(exec, Kernel::convert, a);
  if (a.x.numel() > 0) exec.kernels->convert(exec, a);
}

void sum_parts(Exec& exec, const SumParts& a) {
  if (noted(exec, Kernel::sum_parts, a)) return;
  check_flat("sum_parts", "x", a.x);
  check_flat("sum_parts", "out", a.out);
  NRL_CHECK(a.x.rank == 2 && a.x.dim(0) > 0 && is_vector(a.out, a.x.dim(1), a.out.dtype),
            "sum_parts: x is {}, out is {}", describe(a.x), describe(a.out));
  const trace::Range range = traced(exec, Kernel::sum_parts, a);
  if (a.x.numel() > 0) exec.kernels->sum_parts(exec, a);
}

void zero(Exec& exec, const Zero& a) {
  if (exec.device && exec.needed) return note_call(exec, "zero", cost(exec, a));  // needs no kernel
  if (noted(exec, Kernel::zero, a)) return;
  NRL_CHECK((a.x.data || a.x.numel() == 0) && a.x.contiguous(), "zero: x is {}, wanted contiguous memory",
            describe(a.x));
  const trace::Range range = traced(exec, Kernel::zero, a);
  if (a.x.numel() == 0) return;
  if (exec.device) {
    exec.device->fill(a.x.data, 0, static_cast<size_t>(a.x.bytes()), exec.stream);
  } else {
    exec.kernels->zero(exec, a);
  }
}

}  // namespace nrl::ops
