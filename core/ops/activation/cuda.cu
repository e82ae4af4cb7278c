// Activations of the MLP on the GPU. plain: out = f(x), dx = dout * f'(x). gated: out = f(gate) * up,
// dgate = dout * up * f'(gate), dup = dout * f(gate). Writes (=) out or dx, backward on request both. A
// thread has `unroll` packs of E elements (16 bytes).

#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/activation.cuh"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

constexpr int threads = 256;

/// Rows of `width` elements of out or dout; the gate and up of x and dx are `width` apart.
template <class T>
struct ActivationArguments {
  const T *x, *dout;
  T *out, *dx;
  int64_t x_stride, dout_stride, out_stride, dx_stride;  ///< of rows
  int64_t width;
  int64_t packs;  ///< of all rows
  Divider packs_per_row;
};

/// The position of a pack.
struct Position {
  int64_t row, column;
};
template <class T>
__device__ __forceinline__ Position position_of(const ActivationArguments<T>& a, int64_t pack, int per_pack) {
  const int64_t row = a.packs_per_row.quotient(pack);
  return {row, (pack - row * a.packs_per_row.divisor()) * per_pack};
}

template <class T, int E, Activation kind, bool gated>
__global__ void __launch_bounds__(threads) activation_kernel(ActivationArguments<T> a) {
  constexpr int unroll = gated ? 2 : 4;  // four packs in flight
  const int64_t base = static_cast<int64_t>(blockIdx.x) * threads * unroll + threadIdx.x;
  Pack<T, E> x[unroll], up[gated ? unroll : 1];
  Position at[unroll];
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const int64_t pack = base + u * threads;
    if (pack >= a.packs) continue;
    at[u] = position_of(a, pack, E);
    const T* p = a.x + at[u].row * a.x_stride + at[u].column;
    x[u].load(p);
    if constexpr (gated) up[u].load(p + a.width);
  }
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    if (base + u * threads >= a.packs) continue;
    float v[E], factor[E];
    x[u].get(v);
    if constexpr (gated) up[u].get(factor);
#pragma unroll
    for (int i = 0; i < E; ++i) {
      v[i] = element::activation<ActivationMath<T>, kind>(v[i]).value;
      if constexpr (gated) v[i] *= factor[i];
    }
    x[u].set(v);
    x[u].store(a.out + at[u].row * a.out_stride + at[u].column);
  }
}

template <class T, int E, Activation kind, bool gated, bool with_out>
__global__ void __launch_bounds__(threads) activation_backward_kernel(ActivationArguments<T> a) {
  constexpr int unroll = 2;  // four or six packs in flight
  const int64_t base = static_cast<int64_t>(blockIdx.x) * threads * unroll + threadIdx.x;
  Pack<T, E> x[unroll], dout[unroll], up[gated ? unroll : 1];
  Position at[unroll];
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const int64_t pack = base + u * threads;
    if (pack >= a.packs) continue;
    at[u] = position_of(a, pack, E);
    const T* p = a.x + at[u].row * a.x_stride + at[u].column;
    x[u].load(p);
    if constexpr (gated) up[u].load(p + a.width);
    dout[u].load(a.dout + at[u].row * a.dout_stride + at[u].column);
  }
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    if (base + u * threads >= a.packs) continue;
    float v[E], g[E], factor[E];
    x[u].get(v);
    dout[u].get(g);
    if constexpr (gated) up[u].get(factor);
#pragma unroll
    for (int i = 0; i < E; ++i) {
      const element::ValueAndSlope<float> y = element::activation<ActivationMath<T>, kind>(v[i]);
      if constexpr (gated) {
        const float dgate = element::gate_gradient(y.slope, factor[i], g[i]),
                    dup = element::up_gradient(y.value, g[i]);
        g[i] = y.value * factor[i];
        v[i] = dgate;
        factor[i] = dup;
      } else {
        v[i] = g[i] * y.slope;
        g[i] = y.value;
      }
    }
    T* p = a.dx + at[u].row * a.dx_stride + at[u].column;
    x[u].set(v);
    x[u].store(p);
    if constexpr (gated) {
      up[u].set(factor);
      up[u].store(p + a.width);
    }
    if constexpr (with_out) {
      dout[u].set(g);
      dout[u].store(a.out + at[u].row * a.out_stride + at[u].column);
    }
  }
}

/// Calls body.operator()<kind, gated>().
template <class Body>
void with_kind(Activation kind, bool gated, const Body& body) {
  auto with_gate = [&]<Activation fixed>() {
    gated ? body.template operator()<fixed, true>() : body.template operator()<fixed, false>();
  };
  switch (kind) {
    case Activation::none:
      return with_gate.template operator()<Activation::none>();
    case Activation::silu:
      return with_gate.template operator()<Activation::silu>();
    case Activation::gelu_tanh:
      return with_gate.template operator()<Activation::gelu_tanh>();
    case Activation::gelu_erf:
      return with_gate.template operator()<Activation::gelu_erf>();
  }
}

/// The arguments that forward and backward share; `out_like` is out or dout.
template <class T>
ActivationArguments<T> arguments_of(const Tensor& x, const Tensor& out_like, int per_pack) {
  ActivationArguments<T> a{};
  a.x = static_cast<const T*>(x.data);
  a.x_stride = x.step(0);
  a.width = out_like.dim(1);
  a.packs_per_row = Divider(a.width / per_pack);
  a.packs = out_like.dim(0) * (a.width / per_pack);
  return a;
}

template <class T, int E>
void forward(Exec& exec, const ActivationForward& f) {
  ActivationArguments<T> a = arguments_of<T>(f.x, f.out, E);
  a.out = static_cast<T*>(f.out.data);
  a.out_stride = f.out.step(0);
  with_kind(f.kind, f.gated, [&]<Activation kind, bool gated>() {
    const unsigned grid = kernel::blocks_for(a.packs, threads * (gated ? 2 : 4));
    NRL_LAUNCH((activation_kernel<T, E, kind, gated>), grid, threads, 0, exec.stream, a);
  });
}

template <class T, int E>
void backward(Exec& exec, const ActivationBackward& b) {
  ActivationArguments<T> a = arguments_of<T>(b.x, b.dout, E);
  a.dout = static_cast<const T*>(b.dout.data);
  a.dout_stride = b.dout.step(0);
  a.dx = static_cast<T*>(b.dx.data);
  a.dx_stride = b.dx.step(0);
  a.out = static_cast<T*>(b.out.data);
  a.out_stride = b.out ? b.out.step(0) : 0;
  const unsigned grid = kernel::blocks_for(a.packs, threads * 2);
  with_kind(b.kind, b.gated, [&]<Activation kind, bool gated>() {
    if (b.out) {
      NRL_LAUNCH((activation_backward_kernel<T, E, kind, gated, true>), grid, threads, 0, exec.stream, a);
    } else {
      NRL_LAUNCH((activation_backward_kernel<T, E, kind, gated, false>), grid, threads, 0, exec.stream, a);
    }
  });
}

void activation_forward_launch(Exec& exec, const ActivationForward& a) {
  // packed_rows(a.out) covers `up` too, which begins one width of `out` after `gate`.
  const bool packed = packed_rows(a.x) && packed_rows(a.out);
  for_float_type(a.x.dtype,
                 [&]<class T>() { packed ? forward<T, per_pack<T>>(exec, a) : forward<T, 1>(exec, a); });
}

void activation_backward_launch(Exec& exec, const ActivationBackward& a) {
  const bool packed = packed_rows(a.x) && packed_rows(a.dout) && packed_rows(a.dx) && packed_rows(a.out);
  for_float_type(a.x.dtype,
                 [&]<class T>() { packed ? backward<T, per_pack<T>>(exec, a) : backward<T, 1>(exec, a); });
}

}  // namespace

void fill_activation(KernelTable& table) {
  table.activation_forward = activation_forward_launch;
  table.activation_backward = activation_backward_launch;
}

}  // namespace nrl::ops::NRL_GPU
