#pragma once
// Gradients of activations that are computed where they are rounded to FP8; included by cuda.cu alone. x =
// [gate, up] and dout are bf16, and each gradient is rounded to bf16 as activation_backward() would store it:
//
//   gated: dgate = dout * up * f'(gate), dup = dout * f(gate)      plain: dx = dout * f'(x)
//
// quantize_gradient_kernel: a block per tile of dout (tile.cuh); writes (=) the tile of dgate and then of dup
// to both copies, and raises amax. Both tiles stay in registers.
// gradient_magnitude_kernel: every thread reads 8 neighbors of dout at a time; raises amax.

#include "core/ops/kernel_table.h"
#include "core/ops/quantize/tile.cuh"
#include "core/ops/shared/gpu/activation.cuh"
#include "core/ops/shared/gpu/amax.cuh"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

struct GradientSource {
  const bf16 *x, *dout;
  int64_t x_step, dout_step;
  int64_t width;  ///< columns of dout; `up` begins `width` columns after `gate`
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

  /// Neighbors of x and dout, or zeros.
  struct Packs {
    Pack<bf16> x, up, dout;
  };
  __device__ __forceinline__ void load(int64_t row, int64_t column, Packs& to) const {
    const bf16* const at = x + row * x_step + column;
    to.x.load(at);
    if (gated) to.up.load(at + width);
    to.dout.load(dout + row * dout_step + column);
  }
  /// dgate and dup, not rounded. dup has no meaning unless `gated`.
  template <Activation kind>
  __device__ __forceinline__ void get(const Packs& packs, float (&dgate)[columns_per_lane],
                                      float (&dup)[columns_per_lane]) const {
    float v[columns_per_lane], g[columns_per_lane], factor[columns_per_lane];
    packs.x.get(v);
    packs.dout.get(g);
    packs.up.get(factor);
#pragma unroll
    for (int c = 0; c < columns_per_lane; ++c) {
      const element::ValueAndSlope<float> y = element::activation<ActivationMath<bf16>, kind>(v[c]);
      dgate[c] = element::gate_gradient(y.slope, gated ? factor[c] : 1.0f, g[c]);
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

template <DType format, Scaling scaling>
__global__ void __launch_bounds__(tile_threads<scaling>, (scaling == Scaling::tensor ? 3 : 2))
    quantize_gradient_kernel(GradientSource source, Copy row_copy, Copy column_copy, float* amax,
                             Measured measured, Rows rows, Divider across) {
  constexpr int ahead = rows_ahead<scaling>;
  const int64_t width = source.width;
  TileWriter<format, scaling> writer(row_copy, column_copy, amax, measured, rows,
                                     source.gated ? 2 * width : width);
  const int64_t tile_row = across.short_quotient(blockIdx.x),
                column0 = (blockIdx.x - tile_row * across.divisor()) * tile_columns<scaling>;
  const TileRows at = tile_rows<scaling>(rows, tile_row);
  if (writer.is_idle(at)) return;
  const LanePlace place;
  const LaneRows lane = lane_rows(at, place, column0 + place.column < width);
  Bf16Values dgate, dup;
  source.with_kind([&]<Activation kind>() {
#pragma unroll
    for (int first = 0; first < rows_per_lane; first += ahead) {
      GradientSource::Packs packs[ahead];
#pragma unroll
      for (int i = 0; i < ahead; ++i)
        if (first + i < lane.count) source.load(lane.row + first + i, column0 + place.column, packs[i]);
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        float gate[columns_per_lane], up[columns_per_lane];
        source.get<kind>(packs[i], gate, up);
        Pack<bf16> rounded;
        rounded.set(gate);
        dgate.set(first + i, rounded);
        rounded.set(up);
        dup.set(first + i, rounded);
      }
    }
  });
  writer.find_scale(measured);
  writer.write(at, column0, width, dgate);
  if (!source.gated) return;
  __syncthreads();
  writer.write(at, width + column0, 2 * width, dup);
}

__global__ void __launch_bounds__(threads)
    gradient_magnitude_kernel(GradientSource source, const int* rows_of_groups, int64_t n, Divider packs,
                              float* amax) {
  float most = 0.0f;
  if (rows_of_groups) n = *rows_of_groups;
  const int64_t count = n * packs.divisor(), step = int64_t{gridDim.x} * threads;
  source.with_kind([&]<Activation kind>() {
    for (int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x; i < count; i += step) {
      const int64_t row = packs.quotient(i);
      GradientSource::Packs loaded;
      source.load(row, (i - row * packs.divisor()) * columns_per_lane, loaded);
      float dgate[columns_per_lane], dup[columns_per_lane];
      source.get<kind>(loaded, dgate, dup);
#pragma unroll
      for (int c = 0; c < columns_per_lane; ++c) {
        most = larger(most, dgate[c]);
        if (source.gated) most = larger(most, dup[c]);
      }
    }
  });
  combine_amax<bf16>(reinterpret_cast<unsigned*>(amax), magnitude(most));
}

template <DType format, Scaling scaling>
void launch_gradient(Exec& exec, const Quantize& a) {
  const Rows rows(a);
  const Divider across(tiles_across<scaling>(a.source.dout.dim(1)));
  NRL_LAUNCH((quantize_gradient_kernel<format, scaling>), grid_of(rows.tiles * across.divisor()),
             tile_threads<scaling>, 0, exec.stream, GradientSource(a.source), Copy(a.row), Copy(a.column),
             (a.row ? a.row : a.column).scales.amax, Measured(a), rows, across);
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
