// FP8 operands on the GPU; formulas in core/ops/quantize.h. What is rounded is bf16 there; parts of weights
// may be f32.
//
// quantize_kernel: a block per tile (tile.cuh); writes (=) both copies and their scales, and raises amax.
// Gradients of activations: gradient.cuh.
// transpose_kernel: a block per tile of 128 x 128, a lane with 4 rows of 16 neighbors; writes (=) out and its
// scales of blocks.
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
#include "core/ops/shared/element.h"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

/// The kernel computes this from x. Each case is a kernel of its own, since they need different registers.
enum class Computed : uint8_t { nothing, norm, activation };

/// The activation, at run time: a switch per thread.
struct Source {
  Activation activation;
  bool gated;
};
struct Norm {
  FloatVector<bf16> weight, bias;
  const float *mean, *rstd;

  explicit Norm(const QuantizeNorm& a)
      : weight(a.weight, a.weight_offset),
        bias(a.bias),
        mean(static_cast<const float*>(a.mean.data)),
        rstd(static_cast<const float*>(a.rstd.data)) {}
};

/// Calls body.operator()<kind, gated>().
template <class Body>
__device__ __forceinline__ void with_activation(Source s, const Body& body) {
  switch (s.activation) {
    case Activation::silu:
      return s.gated ? body.template operator()<Activation::silu, true>()
                     : body.template operator()<Activation::silu, false>();
    case Activation::gelu_tanh:
      return s.gated ? body.template operator()<Activation::gelu_tanh, true>()
                     : body.template operator()<Activation::gelu_tanh, false>();
    default:
      return s.gated ? body.template operator()<Activation::gelu_erf, true>()
                     : body.template operator()<Activation::gelu_erf, false>();
  }
}

/// A lane's rows of the source, the first of which begins at `from`.
template <int n>
__device__ __forceinline__ void load_rows(const bf16* from, int64_t step, int count, Pack<bf16> (&rows)[n]) {
#pragma unroll
  for (int r = 0; r < n; ++r)
    if (r < count) rows[r].load(from + r * step);
}

/// f(0) is 0. `most_ahead`: rows in flight at least, if registers allow.
template <int most_ahead>
__device__ __forceinline__ FloatValues activated_values(const bf16* from, int64_t step, int64_t k, int count,
                                                        Source source) {
  FloatValues out;
  with_activation(source, [&]<Activation kind, bool gated>() {
    constexpr int ahead = kind == Activation::gelu_erf ? 1 : most_ahead;  // it takes most registers
#pragma unroll
    for (int first = 0; first < rows_per_lane; first += ahead) {
      Pack<bf16> x[ahead], up[ahead];
      load_rows(from + first * step, step, count - first, x);
      if (gated) load_rows(from + k + first * step, step, count - first, up);
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        float(&v)[columns_per_lane] = out.v[first + i];
        float factor[columns_per_lane];
        x[i].get(v);
        if (gated) up[i].get(factor);
#pragma unroll
        for (int c = 0; c < columns_per_lane; ++c) {
          v[c] = element::activation<GpuMath, kind>(v[c]).value;
          if (gated) v[c] *= factor[c];
        }
      }
    }
  });
  return out;
}

/// Normalizes rows from `row` on.
__device__ __forceinline__ void normalize(Pack<bf16> (&rows)[rows_per_lane], int64_t row, int64_t column,
                                          int count, const Norm& norm) {
  if (count == 0) return;
  float weight[columns_per_lane], bias[columns_per_lane] = {};
  norm.weight.get(column, weight);
  if (norm.bias.data) norm.bias.get(column, bias);
#pragma unroll
  for (int r = 0; r < rows_per_lane; ++r) {
    if (r >= count) continue;
    const float mean = norm.mean ? norm.mean[row + r] : 0.0f, rstd = norm.rstd[row + r];
    float v[columns_per_lane];
    rows[r].get(v);
#pragma unroll
    for (int c = 0; c < columns_per_lane; ++c)
      v[c] = element::normalized(v[c], mean, rstd, weight[c]) + bias[c];
    rows[r].set(v);
  }
}

/// Blocks that share a multiprocessor: as many as their registers allow without spills.
template <Scaling scaling, Computed computed>
constexpr int quantize_blocks = scaling != Scaling::tensor      ? 2
                                : computed == Computed::nothing ? 6
                                                                : 4;

template <DType format, Scaling scaling, Computed computed>
__global__ void __launch_bounds__(tile_threads<scaling>, (quantize_blocks<scaling, computed>))
    quantize_kernel(const bf16* __restrict__ x, Source source, Norm norm, Copy row_copy, Copy column_copy,
                    float* amax, Measured measured, Rows rows, Divider across, int64_t k, int64_t x_step) {
  TileWriter<format, scaling> writer(row_copy, column_copy, amax, measured, rows, k);
  const int64_t tile_row = across.short_quotient(blockIdx.x),
                column0 = (blockIdx.x - tile_row * across.divisor()) * tile_columns<scaling>;
  const TileRows at = tile_rows<scaling>(rows, tile_row);
  if (writer.is_idle(at)) return;
  const LanePlace place;
  const int64_t column = column0 + place.column;
  const LaneRows lane = lane_rows(at, place, column < k);
  const bf16* from = x + lane.row * x_step + column;
  if constexpr (computed == Computed::activation) {
    const FloatValues values = activated_values<rows_ahead<scaling>>(from, x_step, k, lane.count, source);
    writer.find_scale(measured);
    writer.write(at, column0, k, values);
  } else {
    Pack<bf16> packs[rows_per_lane];
    load_rows(from, x_step, lane.count, packs);
    if constexpr (computed == Computed::norm) normalize(packs, lane.row, column, lane.count, norm);
    Bf16Values values;
#pragma unroll
    for (int r = 0; r < rows_per_lane; ++r) values.set(r, packs[r]);
    writer.find_scale(measured);
    writer.write(at, column0, k, values);
  }
}

__global__ void __launch_bounds__(threads)
    transpose_kernel(const unsigned char* __restrict__ x, unsigned char* __restrict__ out, int64_t n,
                     int64_t k, Divider across, Copy x_scales, Copy out_scales) {
  constexpr int per_lane = 16, lanes = side / per_lane;  // a row
  NRL_SHARED(uint4, data, [side][side / 16]);
  const TransposedTile<side, per_lane> tile(data);
  const int word = static_cast<int>(threadIdx.x / lanes),
            column = static_cast<int>(threadIdx.x % lanes * per_lane);
  const int64_t tile_row = across.short_quotient(blockIdx.x), row0 = tile_row * side,
                column0 = (blockIdx.x - tile_row * across.divisor()) * side;
  const unsigned char* const from = x + (row0 + 4 * word) * k + column0 + column;
  unsigned* const to = tile.words(column, 4 * word);
  Pack<unsigned> rows[4];
#pragma unroll
  for (int r = 0; r < 4; ++r)
    if (column0 + column < k && row0 + 4 * word < n)
      rows[r].load(reinterpret_cast<const unsigned*>(from + r * k));
#pragma unroll
  for (int i = 0; i < per_lane / 4; ++i) {
    unsigned words[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) words[r] = word_of(rows[r].raw[0], i);
    tile.put(to, i, words);
  }
  __syncthreads();
  tile.store<threads>(out + column0 * n + row0, n, within(k - column0, side), within(n - row0, side));
  if (threadIdx.x == 0 && x_scales.data)
    out_scales.store_scale<Scaling::block128>(
        column0, row0,
        fp8::scale_byte(fp8::scale_at(Scaling::block128, x_scales.scales, x_scales.row_step,
                                      x_scales.column_step, row0, column0)));
}

/// Neighbors that a lane has in a row of a part's tile.
constexpr int part_per_lane = side / warp;

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
           static_cast<int>(threadIdx.x) % warp * part_per_lane;
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
      float v[part_per_lane] = {};
      if (p.has(at)) load_floats(p.x + (at - p.first), v);
#pragma unroll
      for (int c = 0; c < part_per_lane; ++c) largest = max(largest, magnitude(v[c]));
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
      float v[part_per_lane];
      load_floats(p.x + (at - p.first), v);
      *reinterpret_cast<unsigned*>(out + (at - p.first)) = block_codes<format>(
          v[0] * inverse, v[1] * inverse, v[2] * inverse, v[3] * inverse, byte == fp8::bad_scale);
    }
  }
}

/// The amax of packs, two elements at a time: magnitudes compare like their bits.
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
  float most = 0.0f;
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
    with_activation(source, [&]<Activation kind, bool gated>() {
      each([&](int, const bf16* from, int64_t column) {
        float v[width], up[width];
        load_floats(from + column, v);
        if (gated) load_floats(from + packs_per_row.divisor() * width + column, up);
#pragma unroll
        for (int c = 0; c < width; ++c) {
          v[c] = element::activation<GpuMath, kind>(v[c]).value;
          most = larger(most, gated ? v[c] * up[c] : v[c]);
        }
      });
    });
  }
  raise_amax<warps>(amax, max(magnitude(most), packed.get()));
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
  const Divider across(tiles_across<scaling>(k));
  const auto with = [&]<Computed computed>() {
    NRL_LAUNCH((quantize_kernel<format, scaling, computed>), grid_of(rows.tiles * across.divisor()),
               tile_threads<scaling>, 0, exec.stream, static_cast<const bf16*>(a.source.x.data),
               (Source{a.source.activation, a.source.gated}), Norm(a.source.norm), Copy(a.row),
               Copy(a.column), (a.row ? a.row : a.column).scales.amax, Measured(a), rows, across, k,
               a.source.x.step(0));
  };
  if (a.source.activation != Activation::none) return with.template operator()<Computed::activation>();
  a.source.norm ? with.template operator()<Computed::norm>() : with.template operator()<Computed::nothing>();
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

void quantize_launch(Exec& exec, const Quantize& a) {
  (a.row ? a.row : a.column).dtype == DType::e4m3 ? launch_scaling<DType::e4m3>(exec, a)
                                                  : launch_scaling<DType::e5m2>(exec, a);
}

void transpose_launch(Exec& exec, const Transpose& a) {
  const int64_t n = a.x.dim(0), k = a.x.dim(1);
  const Divider across(tiles_across<Scaling::block128>(k));
  const bool blocks = a.x.scales.kind == Scaling::block128;
  NRL_LAUNCH(transpose_kernel, grid_of((n + side - 1) / side * across.divisor()), threads, 0, exec.stream,
             static_cast<const unsigned char*>(a.x.data), static_cast<unsigned char*>(a.out.data), n, k,
             across, blocks ? Copy(a.x) : Copy(Tensor{}), blocks ? Copy(a.out) : Copy(Tensor{}));
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
