// Linear layers on the CPU:
//
//   forward         out (=, +=) = act(x W^T + bias)
//   backward data   dx (=, +=) = dout W
//   backward weight dweight (=, +=) = dout^T x, dbias (=, +=) = column sums of dout
//
// oneDNN multiplies in f32, or with AVX-512 the kernels of gemm/packed_avx512.h. Other operands are upcast to
// f32 in tiles of upcast_tile rows, and a 16-bit result is rounded once, after the last tile that adds to it.
// GEMMs of one row (generation) do not upcast the weight.
//
// With AVX-512 bf16 operands are upcast while they are packed, and with AVX512_BF16 or AMX multiplied as they
// are; sums are in f32 as before. vdpbf16ps and tdpbf16ps treat subnormal operands as zero and flush
// subnormal sums; the first rounds after each product of a pair instead of fusing them, the second sums the
// products of even and odd elements apart, 16 of each. Operands are exact either way, so that all errors come
// from f32 sums.

#include <algorithm>
#include <cstring>

#include "core/device/cpu/parallel.h"
#include "core/ops/gemm/onednn.h"
#if defined(NRL_ISA_avx512)
#include "core/ops/gemm/packed_avx512.h"
#endif
#if defined(NRL_ISA_avx512_amx)
#include "core/ops/gemm/packed_amx.h"
#include "core/ops/gemm/tiles_amx.h"
#elif defined(NRL_ISA_amx_emulated)
#include "core/ops/gemm/packed_amx.h"
#include "core/ops/gemm/tiles_emulated.h"
#endif
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

/// to (dense, rows of `columns`) = from, or the other way round.
template <class From, class To>
void copy_rows(int threads, int64_t rows, int64_t columns, const From* from, int64_t from_ld, To* to,
               int64_t to_ld) {
  cpu::parallel_for(threads, rows, row_grain(columns), [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) copy_row(from + r * from_ld, to + r * to_ld, columns);
  });
}

Tensor block(const Tensor& t, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  return t.rows(row, rows).columns(column, columns);
}

/// `t` as an f32 operand: itself, or upcast into `buffer`.
Matrix upcast(Exec& exec, const Tensor& t, float* buffer) {
  if (t.dtype == DType::f32) return {data_of<float>(t), t.step(0)};
  if (is_fp8(t)) {
    decode_rows(exec.threads, t, buffer);
    return {buffer, t.dim(1)};
  }
  if (t.dtype == DType::f16)
    copy_rows(exec.threads, t.dim(0), t.dim(1), data_of<const f16>(t), t.step(0), buffer, t.dim(1));
  else
    copy_rows(exec.threads, t.dim(0), t.dim(1), data_of<const bf16>(t), t.step(0), buffer, t.dim(1));
  return {buffer, t.dim(1)};
}

/// The f32 destination of a GEMM that makes `t`: `t` itself, or `buffer`, from which round_result() rounds
/// it. When the GEMM accumulates, the buffer starts with the values of `t`.
Matrix destination(Exec& exec, const Tensor& t, float* buffer, bool accumulate) {
  if (t.dtype == DType::f32) return {data_of<float>(t), t.step(0)};
  return accumulate ? upcast(exec, t, buffer) : Matrix{buffer, t.dim(1)};
}
void round_result(Exec& exec, const Tensor& t, const float* buffer) {
  if (t.dtype == DType::bf16)
    copy_rows(exec.threads, t.dim(0), t.dim(1), buffer, t.dim(1), data_of<bf16>(t), t.step(0));
  else if (t.dtype == DType::f16)
    copy_rows(exec.threads, t.dim(0), t.dim(1), buffer, t.dim(1), data_of<f16>(t), t.step(0));
}

/// Tile lengths: everything at once in f32, bounded tiles where an operand is upcast.
int64_t tile(bool upcasts, int64_t n) {
  return upcasts ? std::min(n, upcast_tile) : n;
}

/// True if an operand is not f32 and must be upcast.
bool any_upcast(const Tensor& a, const Tensor& b, const Tensor& c) {
  return a.dtype != DType::f32 || b.dtype != DType::f32 || c.dtype != DType::f32;
}

/// f32 copies of one tile of the operands.
struct Buffers {
  float *x = nullptr, *weight = nullptr, *y = nullptr;  ///< (n, k), (m, k), (n, m)
  Buffers(Scratch& scratch, bool upcasts, int64_t n, int64_t m, int64_t k, bool upcast_weight = true) {
    if (!upcasts) return;
    x = scratch.floats(n * k);
    if (upcast_weight) weight = scratch.floats(m * k);
    y = scratch.floats(n * m);
  }
};

void activate(Exec& exec, Activation kind, Matrix y, int64_t rows, int64_t columns) {
  if (kind == Activation::none) return;
  Tensor t = make_tensor(y.data, DType::f32, {rows, columns});
  t.stride[0] = y.ld;
  exec.kernels->activation_forward(exec, {.kind = kind, .x = t, .out = t});
}

/// y = x W^T (+ bias) for one row of x, as in generation: bound by the bandwidth of the weight, which is read
/// once and in its own type.
void one_row(Exec& exec, const float* x, const Tensor& weight, const float* bias, bool accumulate, float* y) {
  for_float_type(weight.dtype, [&]<class W>() {
    const W* w = data_of<const W>(weight);
    const int64_t k = weight.dim(1), ld = weight.step(0);
    cpu::parallel_for(exec.threads, weight.dim(0), row_grain(k), [=](int64_t begin, int64_t end) {
      constexpr int64_t ahead = 2048 / static_cast<int64_t>(sizeof(W));
      for (int64_t j = begin; j < end; ++j) {
        const W* const row = w + j * ld;
        const float sum = sum_lanes_of<8>(k, [&](int64_t i, auto part) {
          __builtin_prefetch(row + i + ahead);
          return part.load(x + i) * part.load(row + i);
        });
        y[j] = sum + (accumulate ? y[j] : bias ? bias[j] : 0.0f);
      }
    });
  });
}

#if defined(NRL_ISA_avx512)
// The kernel of GEMMs whose operands are both bf16.
#if defined(NRL_ISA_avx512_amx)
constexpr auto products = Bf16Products::amx;
using Bf16Kernel = packed::TileKernel<Tiles>;
#elif defined(NRL_ISA_amx_emulated)
constexpr auto products = Bf16Products::amx;
using Bf16Kernel = packed::TileKernel<EmulatedTiles>;
#elif defined(NRL_ISA_avx512_bf16)
constexpr auto products = Bf16Products::native;
using Bf16Kernel = packed::VectorKernel<bf16>;
#else
constexpr auto products = Bf16Products::packed;
using Bf16Kernel = packed::VectorKernel<float>;
#endif

packed::Operand operand(const Tensor& t, bool transposed = false) {
  return {t.data, t.dtype, t.step(0), transposed};
}

/// True for f32 and bf16, which are packed as they are; others are upcast before.
bool packs(const Tensor& a, const Tensor& b, const Tensor& c) {
  const auto packed = [](const Tensor& t) { return t.dtype == DType::f32 || t.dtype == DType::bf16; };
  return packed(a) && packed(b) && packed(c);
}

void multiply(int threads, const packed::Product& p, Scratch& scratch) {
  if (p.a.dtype == DType::bf16 && p.b.dtype == DType::bf16)
    packed::multiply<Bf16Kernel>(threads, p, scratch);
  else
    packed::multiply<packed::VectorKernel<float>>(threads, p, scratch);
}

bool packed_forward(Exec& exec, const LinearForward& a) {
  const int64_t n = a.x.dim(0), k = a.x.dim(1), m = a.weight.dim(0);
  if (n == 1 || !packs(a.x, a.weight, a.out)) return false;
  Scratch scratch("linear_forward", exec.workspace);
  packed::Product p{
      .rows = n, .columns = m, .inner = k, .a = operand(a.x), .b = operand(a.weight), .c = a.out};
  p.accumulate = a.accumulate;
  if (a.bias) p.bias = upcast(exec, make_tensor(a.bias.data, a.bias.dtype, {1, m}), scratch.floats(m)).data;
  multiply(exec.threads, p, scratch);
  if (a.activation != Activation::none)
    exec.kernels->activation_forward(exec, {.kind = a.activation, .x = a.out, .out = a.out});
  return true;
}

bool packed_backward_data(Exec& exec, const LinearBackwardData& a) {
  if (!packs(a.dout, a.weight, a.dx)) return false;
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
  return true;
}

bool packed_backward_weight(Exec& exec, const LinearBackwardWeight& a) {
  if (!packs(a.dout, a.x, a.dweight)) return false;
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
  return true;
}

// GEMMs of f32 tiles.

void multiply_tile(Exec& exec, int64_t rows, int64_t columns, int64_t inner, packed::Operand a,
                   packed::Operand b, Matrix c, const float* bias, bool accumulate, const Workspace& rest) {
  Tensor out = make_tensor(c.data, DType::f32, {rows, columns});
  out.stride[0] = c.ld;
  Scratch scratch("linear", rest);
  packed::multiply<packed::VectorKernel<float>>(exec.threads,
                                                {.rows = rows,
                                                 .columns = columns,
                                                 .inner = inner,
                                                 .a = a,
                                                 .b = b,
                                                 .c = out,
                                                 .accumulate = accumulate,
                                                 .bias = bias},
                                                scratch);
}
packed::Operand operand(Matrix t, bool transposed = false) {
  return {t.data, DType::f32, t.ld, transposed};
}

void tile_forward(Exec& exec, int64_t n, int64_t m, int64_t k, Matrix x, Matrix w, Matrix y,
                  const float* bias, bool accumulate, bool, const Workspace& rest) {
  multiply_tile(exec, n, m, k, operand(x), operand(w), y, bias, accumulate, rest);
}
void tile_backward_data(Exec& exec, int64_t n, int64_t m, int64_t k, Matrix dy, Matrix w, Matrix dx,
                        bool accumulate, const Workspace& rest) {
  multiply_tile(exec, n, k, m, operand(dy), operand(w, true), dx, nullptr, accumulate, rest);
}
void tile_backward_weight(Exec& exec, int64_t n, int64_t m, int64_t k, Matrix dy, Matrix x, Matrix dw,
                          bool accumulate, const Workspace& rest) {
  multiply_tile(exec, m, k, n, operand(dy, true), operand(x, true), dw, nullptr, accumulate, rest);
}
#else
constexpr auto products = Bf16Products::upcast;
bool packed_forward(Exec&, const LinearForward&) {
  return false;
}
bool packed_backward_data(Exec&, const LinearBackwardData&) {
  return false;
}
bool packed_backward_weight(Exec&, const LinearBackwardWeight&) {
  return false;
}

void tile_forward(Exec& exec, int64_t n, int64_t m, int64_t k, Matrix x, Matrix w, Matrix y,
                  const float* bias, bool accumulate, bool varying_rows, const Workspace& rest) {
  gemm_forward(n, m, k, x, w, y, bias, accumulate, exec.threads, varying_rows ? Workspace{} : rest);
}
void tile_backward_data(Exec& exec, int64_t n, int64_t m, int64_t k, Matrix dy, Matrix w, Matrix dx,
                        bool accumulate, const Workspace&) {
  gemm_backward_data(n, m, k, dy, w, dx, accumulate, exec.threads);
}
void tile_backward_weight(Exec& exec, int64_t n, int64_t m, int64_t k, Matrix dy, Matrix x, Matrix dw,
                          bool accumulate, const Workspace&) {
  gemm_backward_weight(n, m, k, dy, x, dw, accumulate, exec.threads);
}
#endif

void forward_kernel(Exec& exec, const LinearForward& a) {
  if (packed_forward(exec, a)) return;
  const int64_t n = a.x.dim(0), k = a.x.dim(1), m = a.weight.dim(0);
  const bool upcasts = any_upcast(a.x, a.weight, a.out);
  const int64_t rows = tile(upcasts, n), columns = tile(upcasts, m);
  Scratch scratch("linear_forward", exec.workspace);
  const bool one = n == 1 && !is_fp8(a.x);
  const Buffers buffer(scratch, upcasts, rows, columns, k, !one);
  const float* bias = nullptr;
  if (a.bias) bias = upcast(exec, make_tensor(a.bias.data, a.bias.dtype, {1, m}), scratch.floats(m)).data;
  for (int64_t j = 0; j < m; j += columns) {
    const int64_t width = std::min(columns, m - j);
    const Tensor weight = block(a.weight, j, width, 0, k);
    const Matrix w = one ? Matrix{} : upcast(exec, weight, buffer.weight);
    for (int64_t i = 0; i < n; i += rows) {
      const int64_t height = std::min(rows, n - i);
      const Tensor out = block(a.out, i, height, j, width);
      const Matrix x = upcast(exec, block(a.x, i, height, 0, k), buffer.x);
      const Matrix y = destination(exec, out, buffer.y, a.accumulate);
      const float* b = bias ? bias + j : nullptr;
      if (one)
        one_row(exec, x.data, weight, b, a.accumulate, y.data);
      else
        tile_forward(exec, height, width, k, x, w, y, b, a.accumulate, a.varying_rows, scratch.rest());
      activate(exec, a.activation, y, height, width);
      round_result(exec, out, buffer.y);
    }
  }
}

void backward_data_kernel(Exec& exec, const LinearBackwardData& a) {
  if (packed_backward_data(exec, a)) return;
  if (is_fp8(a.dout))
    return forward_kernel(exec, {.x = a.dout, .weight = a.weight, .out = a.dx, .accumulate = a.accumulate});
  const int64_t n = a.dout.dim(0), m = a.dout.dim(1), k = a.weight.dim(1);
  const bool upcasts = any_upcast(a.dout, a.weight, a.dx);
  const int64_t rows = tile(upcasts, n), columns = tile(upcasts, m);
  Scratch scratch("linear_backward_data", exec.workspace);
  const Buffers buffer(scratch, upcasts, rows, columns, k);
  for (int64_t i = 0; i < n; i += rows) {
    const int64_t height = std::min(rows, n - i);
    const Tensor out = block(a.dx, i, height, 0, k);
    const Matrix dx = destination(exec, out, buffer.x, a.accumulate);
    if (m == 0 && !a.accumulate)
      for (int64_t r = 0; r < height; ++r) std::fill_n(dx.data + r * dx.ld, k, 0.0f);
    for (int64_t j = 0; j < m; j += columns) {
      const int64_t width = std::min(columns, m - j);
      const Matrix dy = upcast(exec, block(a.dout, i, height, j, width), buffer.y);
      const Matrix w = upcast(exec, block(a.weight, j, width, 0, k), buffer.weight);
      tile_backward_data(exec, height, width, k, dy, w, dx, a.accumulate || j > 0, scratch.rest());
    }
    round_result(exec, out, buffer.x);
  }
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

void backward_weight_kernel(Exec& exec, const LinearBackwardWeight& a) {
  if (packed_backward_weight(exec, a)) return;
  if (is_fp8(a.dout))
    return forward_kernel(exec, {.x = a.dout, .weight = a.x, .out = a.dweight, .accumulate = a.accumulate});
  const int64_t n = a.dout.dim(0), m = a.dout.dim(1), k = a.x.dim(1);
  const bool upcasts = any_upcast(a.dout, a.x, a.dweight);
  const int64_t rows = tile(upcasts, n), columns = tile(upcasts, m);
  Scratch scratch("linear_backward_weight", exec.workspace);
  const Buffers buffer(scratch, upcasts, rows, columns, k);
  for (int64_t i = 0; i < n; i += rows) {
    const int64_t height = std::min(rows, n - i);
    const Matrix x = upcast(exec, block(a.x, i, height, 0, k), buffer.x);
    for (int64_t j = 0; j < m; j += columns) {
      const int64_t width = std::min(columns, m - j);
      const Matrix dy = upcast(exec, block(a.dout, i, height, j, width), buffer.y);
      const Tensor dw = a.dweight.rows(j, width);
      tile_backward_weight(exec, height, width, k, dy, x, {data_of<float>(dw), dw.step(0)},
                           a.accumulate || i > 0, scratch.rest());
    }
  }
}

}  // namespace

void fill_linear(KernelTable& table) {
  table.linear_forward = forward_kernel;
  table.linear_backward_data = backward_data_kernel;
  table.linear_backward_weight = backward_weight_kernel;
  table.column_sums = column_sums_kernel;
  table.bf16_products = products;
}

}  // namespace nrl::ops::NRL_ISA
