// Linear layers on the CPU:
//
//   forward         out (=, +=) = act(x W^T + bias), or scale x W^T
//   backward data   dx (=, +=) = dout W, or scale dout W
//   backward weight dweight (=, +=) = dout^T x, dbias (=, +=) = column sums of dout
//
// Operands of 16 bits are upcast to f32 while they are packed (gemm/packed.h), and a 16-bit result is rounded
// once. Operands in FP8 are decoded to f32 in tiles of rows. One row, and up to 32 (gemm/few_rows.h), as in
// generation, are multiplied by the weight as it is stored.
//
// With AVX512_BF16 or AMX bf16 operands are multiplied as they are; sums are in f32 as before. vdpbf16ps and
// tdpbf16ps treat subnormal operands as zero and flush subnormal sums; the first rounds after each product of
// a pair instead of fusing them, the second sums the products of even and odd elements apart, 16 of each.
// Operands are exact either way, so that all errors come from f32 sums.

#include <algorithm>
#include <cstring>

#include "core/device/cpu/parallel.h"
#include "core/ops/gemm/bf16_kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/cpu/fp8_rows.h"
#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/cpu/sums.h"
#include "core/ops/shared/scratch.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t grain_elements = 16384;

int64_t row_grain(int64_t columns) {
  return std::max<int64_t>(1, grain_elements / std::max<int64_t>(columns, 1));
}

/// y = x, rounded once.
template <class From, class To>
NRL_INLINE void copy_row(const From* x, To* y, int64_t columns) {
  for_lanes(columns, [=](int64_t i, auto part) { part.store(y + i, part.load(x + i)); });
}

/// The `columns` elements of `t` in f32: themselves, or a copy.
const float* f32_row(const Tensor& t, int64_t columns, Scratch& scratch) {
  if (t.dtype == DType::f32) return data_of<const float>(t);
  float* const row = scratch.floats(columns);
  for_float_type(t.dtype, [&]<class T>() { copy_row(data_of<const T>(t), row, columns); });
  return row;
}

void activate(Exec& exec, Activation kind, const Tensor& y) {
  if (kind != Activation::none) exec.kernels->activation_forward(exec, {.kind = kind, .x = y, .out = y});
}

/// y = x W^T (+ bias) for one row of x, as in generation: bound by the bandwidth of the weight, which is read
/// once and in its own type.
void one_row(Exec& exec, const float* x, const Tensor& weight, const float* bias, bool accumulate, float* y) {
  for_float_type(weight.dtype, [&]<class W>() {
    const W* w = data_of<const W>(weight);
    const int64_t k = weight.dim(1), ld = weight.step(0);
    cpu::parallel_for(exec.threads, weight.dim(0), row_grain(k), [=](int64_t begin, int64_t end) {
      // To the first-level cache, and before that to the second one: the hardware does not look beyond a row.
      constexpr int64_t near = 512 / static_cast<int64_t>(sizeof(W)), far = 8 * near;
      for (int64_t j = begin; j < end; ++j) {
        const W* const row = w + j * ld;
        const float sum = sum_lanes_of<8>(k, [&](int64_t i, auto part) {
          __builtin_prefetch(row + i + far, 0, 2);
          __builtin_prefetch(row + i + near);
          return part.load(x + i) * part.load(row + i);
        });
        y[j] = sum + (accumulate ? y[j] : bias ? bias[j] : 0.0f);
      }
    });
  });
}

void one_row_forward(Exec& exec, const LinearForward& a) {
  const int64_t k = a.x.dim(1), m = a.weight.dim(0);
  const bool rounds = a.out.dtype != DType::f32;
  Scratch scratch("linear_forward", exec.workspace);
  const float* const x = f32_row(a.x, k, scratch);
  const float* const bias = a.bias ? f32_row(a.bias, m, scratch) : nullptr;
  const Tensor y = rounds ? make_tensor(scratch.floats(m), DType::f32, {1, m}) : a.out;
  for_float_type(a.out.dtype, [&]<class T>() {
    if (rounds && a.accumulate) copy_row(data_of<const T>(a.out), data_of<float>(y), m);
    one_row(exec, x, a.weight, bias, a.accumulate, data_of<float>(y));
    activate(exec, a.activation, y);
    if (rounds) copy_row(data_of<const float>(y), data_of<T>(a.out), m);
  });
}

packed::Operand operand(const Tensor& t, bool transposed = false) {
  return {t.data, t.dtype, t.step(0), transposed};
}

template <class Kernel>
void multiply_as(int threads, const packed::Product& p, Scratch& scratch) {
  if (!packed::multiply_few_rows<Kernel>(threads, p, scratch)) packed::multiply<Kernel>(threads, p, scratch);
}

void multiply(int threads, const packed::Product& p, Scratch& scratch) {
  if (p.a.dtype == DType::bf16 && p.b.dtype == DType::bf16)
    multiply_as<packed::Bf16Kernel>(threads, p, scratch);
  else
    multiply_as<packed::VectorKernel<float>>(threads, p, scratch);
}

/// The forward GEMM of operands in FP8.
void multiply_decoded(int threads, const LinearForward& a, const float* bias, Scratch& scratch) {
  const int64_t n = a.x.dim(0), k = a.x.dim(1), m = a.weight.dim(0);
  const int64_t rows = std::min(n, packed::decoded_rows), columns = std::min(m, packed::decoded_rows);
  float *const x = scratch.floats(rows * k), *const weight = scratch.floats(columns * k);
  for (int64_t j = 0; j < m; j += columns) {
    const int64_t width = std::min(columns, m - j);
    decode_rows(threads, a.weight.rows(j, width), weight);
    for (int64_t i = 0; i < n; i += rows) {
      const int64_t height = std::min(rows, n - i);
      decode_rows(threads, a.x.rows(i, height), x);
      Scratch rest("linear_forward", scratch.rest());
      multiply(threads,
               {.rows = height,
                .columns = width,
                .inner = k,
                .a = {x, DType::f32, k},
                .b = {weight, DType::f32, k},
                .c = a.out.rows(i, height).columns(j, width),
                .accumulate = a.accumulate,
                .bias = bias ? bias + j : nullptr},
               rest);
    }
  }
}

/// y *= scale. The factors of adapters have few columns: a second pass over them costs little.
void multiply_by(Exec& exec, float scale, const Tensor& y) {
  if (scale == 1.0f) return;
  for_float_type(y.dtype, [&]<class T>() {
    T* const data = data_of<T>(y);
    const int64_t columns = y.dim(1), ld = y.step(0);
    cpu::parallel_for(exec.threads, y.dim(0), row_grain(columns), [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* const row = data + r * ld;
        for_lanes(columns, [=](int64_t i, auto part) { part.store(row + i, part.load(row + i) * scale); });
      }
    });
  });
}

void forward_of_rows(Exec& exec, const LinearForward& a) {
  const bool fp8 = is_fp8(a.x);
  if (a.x.dim(0) == 1 && !fp8) return one_row_forward(exec, a);
  Scratch scratch("linear_forward", exec.workspace);
  const float* const bias = a.bias ? f32_row(a.bias, a.weight.dim(0), scratch) : nullptr;
  if (fp8)
    multiply_decoded(exec.threads, a, bias, scratch);
  else
    multiply(exec.threads,
             {.rows = a.x.dim(0),
              .columns = a.weight.dim(0),
              .inner = a.x.dim(1),
              .a = operand(a.x),
              .b = operand(a.weight),
              .c = a.out,
              .accumulate = a.accumulate,
              .bias = bias},
             scratch);
  activate(exec, a.activation, a.out);
}

void forward_kernel(Exec& exec, const LinearForward& a) {
  forward_of_rows(exec, a);
  multiply_by(exec, a.scale, a.out);
}

void backward_data_kernel(Exec& exec, const LinearBackwardData& a) {
  if (is_fp8(a.dout))
    return forward_kernel(
        exec, {.x = a.dout, .weight = a.weight, .out = a.dx, .accumulate = a.accumulate, .scale = a.scale});
  Scratch scratch("linear_backward_data", exec.workspace);
  multiply(exec.threads,
           {.rows = a.dx.dim(0),
            .columns = a.dx.dim(1),
            .inner = a.dout.dim(1),
            .a = operand(a.dout),
            .b = operand(a.weight, true),
            .c = a.dx,
            .accumulate = a.accumulate},
           scratch);
  multiply_by(exec, a.scale, a.dx);
}

void backward_weight_kernel(Exec& exec, const LinearBackwardWeight& a) {
  if (is_fp8(a.dout))
    return forward_kernel(exec, {.x = a.dout, .weight = a.x, .out = a.dweight, .accumulate = a.accumulate});
  Scratch scratch("linear_backward_weight", exec.workspace);
  multiply(exec.threads,
           {.rows = a.dweight.dim(0),
            .columns = a.dweight.dim(1),
            .inner = a.dout.dim(0),
            .a = operand(a.dout, true),
            .b = operand(a.x, true),
            .c = a.dweight,
            .accumulate = a.accumulate},
           scratch);
}

/// sums (m) = or += column sums of t (n, m). A thread owns a range of columns; rows are added in blocks,
/// whose sums are added in order, so that the result depends on neither threads nor timing and long columns
/// keep their precision.
template <class T>
void column_sums(int threads, const Tensor& t, float* sums, bool accumulate) {
  constexpr int64_t width = 1024, depth = 64;
  const int64_t n = t.dim(0), m = t.dim(1), ld = t.step(0);
  const T* data = data_of<const T>(t);
  cpu::parallel_for(threads, (m + 15) / 16, std::max<int64_t>(1, row_grain(n) / 16),
                    [=](int64_t begin, int64_t end) {
                      for (int64_t c = begin * 16; c < std::min(m, end * 16); c += width) {
                        const int64_t count = std::min({width, m - c, end * 16 - c});
                        alignas(64) float total[width] = {}, part[width];
                        for (int64_t r = 0; r < n; r += depth) {
                          std::memset(part, 0, sizeof part);
                          for (int64_t i = r; i < std::min(n, r + depth); ++i) {
                            const T* x = data + i * ld + c;
#pragma omp simd
                            for (int64_t j = 0; j < count; ++j) part[j] += static_cast<float>(x[j]);
                          }
                          for (int64_t j = 0; j < count; ++j) total[j] += part[j];
                        }
                        for (int64_t j = 0; j < count; ++j)
                          sums[c + j] = accumulate ? sums[c + j] + total[j] : total[j];
                      }
                    });
}

void column_sums_kernel(Exec& exec, const ColumnSums& a) {
  for_float_type(a.x.dtype,
                 [&]<class T>() { column_sums<T>(exec.threads, a.x, data_of<float>(a.out), a.accumulate); });
}

}  // namespace

void fill_linear(KernelTable& table) {
  table.linear_forward = forward_kernel;
  table.linear_backward_data = backward_data_kernel;
  table.linear_backward_weight = backward_weight_kernel;
  table.column_sums = column_sums_kernel;
  table.bf16_products = packed::bf16_products;
}

}  // namespace nrl::ops::NRL_ISA
