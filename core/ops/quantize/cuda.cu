// FP8 operands on the GPU; formulas in core/ops/quantize.h. What is rounded is bf16 there; parts of weights
// may be f32.
//
// quantize_kernel: a block per tile of 128 x 128 (tile.cuh), which holds whole blocks of scales of both
// copies; writes (=) both copies and their scales, and raises amax. Gradients of activations: gradient.cuh.
// transpose_kernel: the same tiles; each lane has 4 neighboring codes of a row in a word; writes (=) out and
// its scales of blocks.
// largest_magnitude_kernel: every thread reads 4 packs of 16 bytes at a time; raises amax.
// block_magnitudes_kernel, quantize_part_kernel: a block per tile of 128 x 128 of the matrix, which reads
// what the part has of it, a warp per row, 4 neighbors per lane; raises amax, or writes (=) out.
// update_scales_kernel: a thread per tensor; writes (=) scale and amax.

#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/quantize/gradient.cuh"
#include "core/ops/quantize/tile.cuh"
#include "core/ops/quantize/update.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/element.h"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

/// What is computed from x, at run time: the same for all threads, and beside the encoding it costs little.
struct Source {
  Activation activation;
  bool gated;
};
struct Norm {
  FloatVector<bf16> weight, bias;
  const float *mean, *rstd;

  explicit Norm(const QuantizeNorm& a)
      : weight(a.weight),
        bias(a.bias),
        mean(static_cast<const float*>(a.mean.data)),
        rstd(static_cast<const float*>(a.rstd.data)) {}
  __device__ __forceinline__ explicit operator bool() const { return weight.data != nullptr; }
};

__device__ __forceinline__ float activated(Activation kind, float x) {
  switch (kind) {
    case Activation::silu:
      return element::activation<GpuMath, Activation::silu>(x).value;
    case Activation::gelu_tanh:
      return element::activation<GpuMath, Activation::gelu_tanh>(x).value;
    case Activation::gelu_erf:
      return element::activation<GpuMath, Activation::gelu_erf>(x).value;
    default:
      return x;
  }
}

/// Four neighbors of a row of the source of `k` columns, which begins at `row`.
__device__ __forceinline__ void load_source(const bf16* row, int64_t column, int64_t k, Source s,
                                            float (&v)[columns_per_lane]) {
  load_floats(row + column, v);
  if (s.activation == Activation::none) return;
#pragma unroll
  for (int c = 0; c < columns_per_lane; ++c) v[c] = activated(s.activation, v[c]);
  if (!s.gated) return;
  float up[columns_per_lane];
  load_floats(row + k + column, up);
#pragma unroll
  for (int c = 0; c < columns_per_lane; ++c) v[c] *= up[c];
}

// Scales of blocks take more registers than two blocks per multiprocessor have.
template <DType format, Scaling scaling>
__global__ void __launch_bounds__(threads, scaling == Scaling::tensor ? 2 : 1)
    quantize_kernel(const bf16* __restrict__ x, Source source, Norm norm, Copy row_copy, Copy column_copy,
                    float* amax, Measured measured, Rows rows, int64_t k, int64_t x_step) {
  const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
  const int64_t across = (k + side - 1) / side, tiles = rows.tiles * across;
  TileWriter<format, scaling> writer(row_copy, column_copy, amax, measured, rows, k);
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const TileRows at = tile_rows(rows, t / across);
    if (at.first >= at.end) break;
    const int64_t n = at.end, column0 = t % across * side, row = at.first + w * rows_per_warp,
                  column = column0 + lane * columns_per_lane;
    const bf16* from = x + (row - at.shift) * x_step;
    const bool inside = column < k;
    float v[rows_per_warp][columns_per_lane];
#pragma unroll
    for (int r = 0; r < rows_per_warp; ++r) {
      if (inside && row + r < at.zeros) {
        load_source(from + r * x_step, column, k, source, v[r]);
      } else {
#pragma unroll
        for (int c = 0; c < columns_per_lane; ++c) v[r][c] = 0.0f;
      }
    }
    if (norm && inside) {
      float weight[columns_per_lane], bias[columns_per_lane] = {};
      norm.weight.get(column, weight);
      if (norm.bias.data) norm.bias.get(column, bias);
#pragma unroll
      for (int r = 0; r < rows_per_warp; ++r) {
        if (row + r >= n) continue;
        const float mean = norm.mean ? norm.mean[row + r] : 0.0f, rstd = norm.rstd[row + r];
#pragma unroll
        for (int c = 0; c < columns_per_lane; ++c)
          v[r][c] = static_cast<float>(bf16(element::normalized(v[r][c], mean, rstd, weight[c]) + bias[c]));
      }
    }
    writer.write(at, column0, k, [&](int r, int c) { return v[r][c]; });
  }
  writer.finish();
}

__global__ void __launch_bounds__(threads)
    transpose_kernel(const unsigned char* __restrict__ x, unsigned char* __restrict__ out, int64_t n,
                     int64_t k, Copy x_scales, Copy out_scales) {
  NRL_SHARED(unsigned, codes, [side][side / 4]);  // of the transpose: 4 rows of x in a word
  const TransposedTile tile{codes};
  const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
  const int64_t across = (k + side - 1) / side, tiles = (n + side - 1) / side * across;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t row0 = t / across * side, column0 = t % across * side, row = row0 + w * rows_per_warp,
                  column = column0 + lane * columns_per_lane;
    unsigned words[rows_per_warp];
#pragma unroll
    for (int r = 0; r < rows_per_warp; ++r)
      words[r] =
          column < k && row + r < n ? *reinterpret_cast<const unsigned*>(x + (row + r) * k + column) : 0;
    tile.put(words, lane, w);
    __syncthreads();
    for (int j = w; j < side && column0 + j < k; j += warps)
      if (row0 + lane * 4 < n)
        *reinterpret_cast<unsigned*>(out + (column0 + j) * n + row0 + lane * 4) = tile.at(j, lane);
    if (threadIdx.x == 0 && x_scales.data)
      out_scales.store_scale<Scaling::block128>(
          column0, row0,
          fp8::scale_byte(fp8::scale_at(Scaling::block128, x_scales.scales, x_scales.row_step,
                                        x_scales.column_step, row0, column0)));
    __syncthreads();
  }
}

/// A part of a matrix (ops::MatrixPart).
template <class T>
struct Part {
  const T* x;
  int64_t first, end, columns, top, across, tiles, scales_per_row;

  explicit Part(const MatrixPart& p)
      : x(static_cast<const T*>(p.x.data)),
        first(p.first),
        end(p.first + p.x.dim(0)),
        columns(p.columns),
        top(p.first / p.columns / side),
        across(p.columns / side),
        tiles(p.x.dim(0) == 0 ? 0 : ((end - 1) / columns / side - top + 1) * across),
        scales_per_row(scale_matrix(Scaling::block128, 1, p.columns).bytes / 4) {}
  /// The place of a tile's scale.
  __device__ __forceinline__ int64_t scale(int64_t tile) const {
    return (top + tile / across) * scales_per_row + tile % across;
  }
  /// The first of the lane's 4 neighbors in a row of a tile, an element of the matrix. They are all in the
  /// part or none.
  __device__ __forceinline__ int64_t element(int64_t tile, int row) const {
    return ((top + tile / across) * side + row) * columns + tile % across * side +
           static_cast<int>(threadIdx.x) % warp * columns_per_lane;
  }
  __device__ __forceinline__ bool has(int64_t element) const { return element >= first && element < end; }
};

template <class T>
__global__ void __launch_bounds__(threads) block_magnitudes_kernel(Part<T> p, unsigned* amax) {
  NRL_SHARED(unsigned, part, [warps]);
  const int w = static_cast<int>(threadIdx.x) / warp;
  for (int64_t t = blockIdx.x; t < p.tiles; t += gridDim.x) {
    unsigned largest = 0;
#pragma unroll
    for (int r = w; r < side; r += warps) {
      const int64_t at = p.element(t, r);
      float v[columns_per_lane] = {};
      if (p.has(at)) load_floats(p.x + (at - p.first), v);
#pragma unroll
      for (int c = 0; c < columns_per_lane; ++c) largest = max(largest, magnitude(v[c]));
    }
    largest = lanes_max(largest, warp);
    if (threadIdx.x % warp == 0) part[w] = largest;
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned* const of_block = amax + p.scale(t);
      for (int i = 0; i < warps; ++i) largest = max(largest, part[i]);
      *of_block = max(*of_block, largest);
    }
    __syncthreads();
  }
}

template <class T, DType format>
__global__ void __launch_bounds__(threads)
    quantize_part_kernel(Part<T> p, const float* __restrict__ scale, unsigned char* __restrict__ out) {
  const int w = static_cast<int>(threadIdx.x) / warp;
  for (int64_t t = blockIdx.x; t < p.tiles; t += gridDim.x) {
    const unsigned byte = fp8::scale_byte(scale[p.scale(t)]);
    const float inverse = fp8::inverse_scale(byte);
#pragma unroll
    for (int r = w; r < side; r += warps) {
      const int64_t at = p.element(t, r);
      if (!p.has(at)) continue;
      float v[columns_per_lane];
      load_floats(p.x + (at - p.first), v);
      *reinterpret_cast<unsigned*>(out + (at - p.first)) = block_codes<format>(v, byte, inverse);
    }
  }
}

/// The largest magnitude of packs, whose elements are compared two at a time, as their bits are.
struct PackedMagnitude {
  unsigned packed = 0;
  __device__ __forceinline__ void add(const Pack<bf16>& pack) {
    static_assert(Pack<bf16>::words == 1);
    const uint4 w = pack.raw[0];
    packed = __vmaxu2(__vmaxu2(packed, __vmaxu2(w.x & low_bits, w.y & low_bits)),
                      __vmaxu2(w.z & low_bits, w.w & low_bits));
  }
  __device__ __forceinline__ unsigned get() const { return max(packed << 16, packed & 0xffff0000u); }

 private:
  static constexpr unsigned low_bits = 0x7fff7fffu;
};

/// Packs of 16 bytes that a thread has in flight.
constexpr int packs_ahead = 4;

__global__ void __launch_bounds__(threads)
    largest_magnitude_kernel(const bf16* __restrict__ x, Source source, const int* rows_of_groups, int64_t n,
                             Divider packs_per_row, int64_t x_step, float* amax) {
  constexpr int width = per_pack<bf16>;
  unsigned largest = 0;
  PackedMagnitude packed;
  if (rows_of_groups) n = *rows_of_groups;
  const int64_t packs = n * packs_per_row.divisor(), step = int64_t{gridDim.x} * threads * packs_ahead;
  for (int64_t i = int64_t{blockIdx.x} * threads * packs_ahead + threadIdx.x; i < packs; i += step) {
    const auto each = [&](const auto& take) {
#pragma unroll
      for (int u = 0; u < packs_ahead; ++u) {
        const int64_t at = i + u * threads;
        if (at >= packs) continue;
        const int64_t row = packs_per_row.quotient(at);
        take(u, x + row * x_step, (at - row * packs_per_row.divisor()) * width);
      }
    };
    if (source.activation == Activation::none) {
      Pack<bf16> pack[packs_ahead];
      each([&](int u, const bf16* from, int64_t column) { pack[u].load(from + column); });
#pragma unroll
      for (int u = 0; u < packs_ahead; ++u) packed.add(pack[u]);
      continue;
    }
    each([&](int, const bf16* from, int64_t column) {
#pragma unroll
      for (int c = 0; c < width; c += columns_per_lane) {
        float v[columns_per_lane];
        load_source(from, column + c, packs_per_row.divisor() * width, source, v);
#pragma unroll
        for (int e = 0; e < columns_per_lane; ++e) largest = max(largest, magnitude(v[e]));
      }
    });
  }
  raise_amax(amax, max(largest, packed.get()));
}

struct Update {
  int64_t step, rows, n;
  DType format;
  int margin;
  bool most_recent, keep, blocks;
};

__global__ void __launch_bounds__(threads)
    update_scales_kernel(float* __restrict__ amax, float* __restrict__ scale, Update u) {
  const int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (i >= u.n) return;
  if (u.blocks)
    fp8::update_block_scale(amax + i, scale + i, u.format);
  else
    fp8::update_scale(amax + i, u.step, u.rows, scale + i, u.format, u.margin, u.most_recent, u.keep);
}

template <DType format, Scaling scaling>
void launch(Exec& exec, const Quantize& a) {
  if (a.source.dout) return launch_gradient<format, scaling>(exec, a);
  const int64_t k = a.source.columns();
  const Rows rows(a);
  const int64_t tiles = rows.tiles * ((k + side - 1) / side);
  const int resident = NRL_RESIDENT((quantize_kernel<format, scaling>), threads);
  NRL_LAUNCH((quantize_kernel<format, scaling>), grid_for(tiles, 1, exec.multiprocessors, resident), threads,
             0, exec.stream, static_cast<const bf16*>(a.source.x.data),
             (Source{a.source.activation, a.source.gated}), Norm(a.source.norm), Copy(a.row), Copy(a.column),
             (a.row ? a.row : a.column).scales.amax, Measured(a), rows, k, a.source.x.step(0));
}

template <DType format>
void launch_scaling(Exec& exec, const Quantize& a) {
  switch ((a.row ? a.row : a.column).scales.kind) {
    case Scaling::row128:
      return launch<format, Scaling::row128>(exec, a);
    case Scaling::block128:
      return launch<format, Scaling::block128>(exec, a);
    case Scaling::mx32:
      return launch<format, Scaling::mx32>(exec, a);
    default:
      return launch<format, Scaling::tensor>(exec, a);
  }
}

/// (nvcc compiles the text of a check away.)
void check_source([[maybe_unused]] const char* op, const QuantizeSource& s) {
  NRL_CHECK(s.x.dtype == DType::bf16, "{}: x is {}, but a GPU has kernels for bf16 only", op, describe(s.x));
}

void quantize_launch(Exec& exec, const Quantize& a) {
  check_source("quantize", a.source);
  (a.row ? a.row : a.column).dtype == DType::e4m3 ? launch_scaling<DType::e4m3>(exec, a)
                                                  : launch_scaling<DType::e5m2>(exec, a);
}

void transpose_launch(Exec& exec, const Transpose& a) {
  const int64_t n = a.x.dim(0), k = a.x.dim(1), tiles = ((n + side - 1) / side) * ((k + side - 1) / side);
  const bool blocks = a.x.scales.kind == Scaling::block128;
  const int resident = NRL_RESIDENT(transpose_kernel, threads);
  NRL_LAUNCH(transpose_kernel, grid_for(tiles, 1, exec.multiprocessors, resident), threads, 0, exec.stream,
             static_cast<const unsigned char*>(a.x.data), static_cast<unsigned char*>(a.out.data), n, k,
             blocks ? Copy(a.x) : Copy(Tensor{}), blocks ? Copy(a.out) : Copy(Tensor{}));
}

void block_magnitudes_launch(Exec& exec, const BlockMagnitudes& a) {
  for_f32_or_bf16(a.part.x.dtype, [&]<class T>() {
    const Part<T> part(a.part);
    if (part.tiles > 0)
      NRL_LAUNCH(
          block_magnitudes_kernel<T>,
          grid_for(part.tiles, 1, exec.multiprocessors, NRL_RESIDENT(block_magnitudes_kernel<T>, threads)),
          threads, 0, exec.stream, part, static_cast<unsigned*>(a.amax.data));
  });
}

void quantize_part_launch(Exec& exec, const QuantizePart& a) {
  for_f32_or_bf16(a.part.x.dtype, [&]<class T>() {
    const Part<T> part(a.part);
    if (part.tiles == 0) return;
    const auto launch = [&]<DType format>() {
      const int resident = NRL_RESIDENT((quantize_part_kernel<T, format>), threads);
      NRL_LAUNCH((quantize_part_kernel<T, format>), grid_for(part.tiles, 1, exec.multiprocessors, resident),
                 threads, 0, exec.stream, part, static_cast<const float*>(a.scale.data),
                 static_cast<unsigned char*>(a.out.data));
    };
    a.out.dtype == DType::e4m3 ? launch.template operator()<DType::e4m3>()
                               : launch.template operator()<DType::e5m2>();
  });
}

void largest_magnitude_launch(Exec& exec, const LargestMagnitude& a) {
  check_source("largest_magnitude", a.source);
  if (a.source.dout) return launch_largest_gradient(exec, a);
  const int64_t n = a.source.x.dim(0), k = a.source.columns();
  const int64_t per_block = int64_t{packs_ahead} * threads * per_pack<bf16>;
  const int resident = NRL_RESIDENT(largest_magnitude_kernel, threads);
  NRL_LAUNCH(largest_magnitude_kernel, grid_for(n * k, per_block, exec.multiprocessors, resident), threads, 0,
             exec.stream, static_cast<const bf16*>(a.source.x.data),
             (Source{a.source.activation, a.source.gated}),
             a.offsets ? static_cast<const int*>(a.offsets.data) + a.offsets.dim(0) - 1 : nullptr, n,
             Divider(k / per_pack<bf16>), a.source.x.step(0), static_cast<float*>(a.amax.data));
}

void update_scales_launch(Exec& exec, const UpdateScales& a) {
  const int64_t n = a.scale.dim(0);
  if (n == 0) return;
  NRL_LAUNCH(update_scales_kernel, static_cast<unsigned>((n + threads - 1) / threads), threads, 0,
             exec.stream, static_cast<float*>(a.amax.data), static_cast<float*>(a.scale.data),
             (Update{a.amax.step(0), a.amax.dim(0), n, a.format, a.margin, a.most_recent, a.keep, a.blocks}));
}

}  // namespace

void fill_quantize(KernelTable& table) {
  table.quantize = quantize_launch;
  table.transpose = transpose_launch;
  table.largest_magnitude = largest_magnitude_launch;
  table.block_magnitudes = block_magnitudes_launch;
  table.quantize_part = quantize_part_launch;
  table.update_scales = update_scales_launch;
}

}  // namespace nrl::ops::NRL_GPU
