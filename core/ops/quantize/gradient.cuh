#pragma once
// Gradients of activations that are computed where they are rounded to FP8; included by cuda.cu alone. Of x =
// [gate, up] and dout in bf16, each rounded to bf16 as activation_backward() would store it:
//
//   gated: dgate = dout * up * f'(gate), dup = dout * f(gate)      plain: dx = dout * f'(x)
//
// quantize_gradient_kernel: a block per tile of 128 x 128 of dout (tile.cuh); writes (=) the tile of dgate to
// both copies and then that of dup, and raises amax. Both stay in registers.
// gradient_magnitude_kernel: every thread reads 4 neighbors of dout at a time; raises amax.

#include "core/ops/kernel_table.h"
#include "core/ops/quantize/tile.cuh"
#include "core/ops/shared/gpu/activation.cuh"
#include "core/ops/shared/gpu/amax.cuh"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

/// dgate and dup of one element.
struct GradientPair {
  unsigned both = 0;
  __device__ __forceinline__ void set(float dgate, float dup) { both = pack_bf16(dgate, dup); }
  __device__ __forceinline__ float get(bool second) const {
    return __uint_as_float(second ? both & 0xffff0000u : both << 16);
  }
};

struct GradientSource {
  const bf16 *x, *dout;
  int64_t x_step, dout_step;
  int64_t width;  ///< columns of dout; `up` begins so many behind `gate`
  Activation kind;
  bool gated;

  explicit GradientSource(const QuantizeSource& s)
      : x(static_cast<const bf16*>(s.x.data)),
        dout(static_cast<const bf16*>(s.dout.data)),
        x_step(s.x.step(0)),
        dout_step(s.dout.step(0)),
        width(s.dout.dim(1)),
        kind(s.activation),
        gated(s.gated) {}

  /// dgate and dup of four neighbors, not rounded. dup has no meaning unless `gated`.
  template <Activation kind>
  __device__ __forceinline__ void get(int64_t row, int64_t column, float (&dgate)[columns_per_lane],
                                      float (&dup)[columns_per_lane]) const {
    float v[columns_per_lane], g[columns_per_lane], factor[columns_per_lane];
    load_floats(x + row * x_step + column, v);
    load_floats(dout + row * dout_step + column, g);
#pragma unroll
    for (int c = 0; c < columns_per_lane; ++c) factor[c] = 1.0f;
    if (gated) load_floats(x + row * x_step + width + column, factor);
#pragma unroll
    for (int c = 0; c < columns_per_lane; ++c) {
      const element::ValueAndSlope<float> y = element::activation<ActivationMath<bf16>, kind>(v[c]);
      dgate[c] = element::gate_gradient(y.slope, factor[c], g[c]);
      dup[c] = element::up_gradient(y.value, g[c]);
    }
  }
  /// Calls body.operator()<kind>().
  template <class Body>
  __device__ __forceinline__ void with_kind(const Body& body) const {
    switch (kind) {
      case Activation::silu:
        return body.template operator()<Activation::silu>();
      case Activation::gelu_tanh:
        return body.template operator()<Activation::gelu_tanh>();
      default:
        return body.template operator()<Activation::gelu_erf>();
    }
  }
};

// Pairs take more registers than two blocks per multiprocessor have.
template <DType format, Scaling scaling>
__global__ void __launch_bounds__(threads, 1)
    quantize_gradient_kernel(GradientSource source, Copy row_copy, Copy column_copy, float* amax,
                             Measured measured, Rows rows) {
  const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
  const int halves = source.gated ? 2 : 1;
  const int64_t width = source.width, across = (width + side - 1) / side, tiles = rows.tiles * across;
  TileWriter<format, scaling> writer(row_copy, column_copy, amax, measured, rows, halves * width);
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const TileRows at = tile_rows(rows, t / across);
    if (at.first >= at.end) break;
    const int64_t row = at.first + w * rows_per_warp, column0 = t % across * side,
                  column = column0 + lane * columns_per_lane;
    GradientPair pairs[rows_per_warp][columns_per_lane];
    source.with_kind([&]<Activation kind>() {
#pragma unroll
      for (int r = 0; r < rows_per_warp; ++r) {
        if (column >= width || row + r >= at.zeros) continue;
        float dgate[columns_per_lane], dup[columns_per_lane];
        source.get<kind>(row + r - at.shift, column, dgate, dup);
#pragma unroll
        for (int c = 0; c < columns_per_lane; ++c) pairs[r][c].set(dgate[c], dup[c]);
      }
    });
#pragma unroll 1
    for (int half = 0; half < halves; ++half)
      writer.write(at, half * width + column0, half * width + width,
                   [&](int r, int c) { return pairs[r][c].get(half != 0); });
  }
  writer.finish();
}

__global__ void __launch_bounds__(threads)
    gradient_magnitude_kernel(GradientSource source, const int* rows_of_groups, int64_t n, Divider packs,
                              float* amax) {
  constexpr int unroll = 2;  // four or six accesses in flight
  unsigned largest = 0;
  if (rows_of_groups) n = *rows_of_groups;
  const int64_t count = n * packs.divisor(), step = int64_t{gridDim.x} * threads * unroll;
  source.with_kind([&]<Activation kind>() {
    for (int64_t base = int64_t{blockIdx.x} * threads * unroll + threadIdx.x; base < count; base += step) {
      float dgate[unroll][columns_per_lane] = {}, dup[unroll][columns_per_lane] = {};
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const int64_t i = base + u * threads, row = packs.quotient(i);
        if (i < count)
          source.get<kind>(row, (i - row * packs.divisor()) * columns_per_lane, dgate[u], dup[u]);
      }
#pragma unroll
      for (int u = 0; u < unroll; ++u)
#pragma unroll
        for (int c = 0; c < columns_per_lane; ++c) {
          largest = max_magnitude(largest, dgate[u][c]);
          if (source.gated) largest = max_magnitude(largest, dup[u][c]);
        }
    }
  });
  combine_amax<bf16>(reinterpret_cast<unsigned*>(amax), largest);
}

template <DType format, Scaling scaling>
void launch_gradient(Exec& exec, const Quantize& a) {
  const Rows rows(a);
  const int64_t tiles = rows.tiles * ((a.source.dout.dim(1) + side - 1) / side);
  const int resident = NRL_RESIDENT((quantize_gradient_kernel<format, scaling>), threads);
  NRL_LAUNCH((quantize_gradient_kernel<format, scaling>), grid_for(tiles, 1, exec.multiprocessors, resident),
             threads, 0, exec.stream, GradientSource(a.source), Copy(a.row), Copy(a.column),
             (a.row ? a.row : a.column).scales.amax, Measured(a), rows);
}

void launch_largest_gradient(Exec& exec, const LargestMagnitude& a) {
  const GradientSource source(a.source);
  const int64_t n = a.source.x.dim(0), packs = source.width / columns_per_lane;
  const int resident = NRL_RESIDENT(gradient_magnitude_kernel, threads);
  NRL_LAUNCH(gradient_magnitude_kernel, grid_for(n * packs, 4 * threads, exec.multiprocessors, resident),
             threads, 0, exec.stream, source,
             a.offsets ? static_cast<const int*>(a.offsets.data) + a.offsets.dim(0) - 1 : nullptr, n,
             Divider(packs), static_cast<float*>(a.amax.data));
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
