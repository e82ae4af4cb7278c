// Activations of the MLP on the CPU; formulas in core/ops/activation.h. Rows are split over the threads.

#include <cstring>

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/activation_row.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t grain_elements = 8192;

/// Elements [begin, begin + count) of a row of x (f, or 2 f when gated), to out[0], out[1], ...
template <class T, Activation kind, bool gated>
NRL_INLINE void forward_elements(const T* x, int64_t f, int64_t begin, int64_t count, T* out) {
  x += begin;
  for_lanes(count, [=](int64_t i, auto part) {
    Lanes y = element::activation<MathFor<T>, kind>(part.load(x + i)).value;
    if constexpr (gated) y *= part.load(x + f + i);
    part.store(out + i, y);
  });
}

/// Elements [begin, begin + count) of a row of x (f, or 2 f when gated) and of dx.
template <class T, Activation kind, bool gated>
NRL_INLINE void backward_elements(const T* dout, const T* x, T* dx, int64_t f, int64_t begin, int64_t count) {
  activation_gradients<T, kind, gated>(dout + begin, x + begin, x + f + begin, dx + begin, dx + f + begin,
                                       count);
}

template <class T, Activation kind, bool gated>
void forward(Exec& exec, const ActivationForward& a) {
  const int64_t n = a.out.dim(0), f = a.out.dim(1);
  cpu::parallel_for(exec.threads, n, std::max<int64_t>(1, grain_elements / f),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t r = begin; r < end; ++r)
                        forward_elements<T, kind, gated>(data_of<const T>(a.x) + r * a.x.stride[0], f, 0, f,
                                                         data_of<T>(a.out) + r * a.out.stride[0]);
                    });
}

template <class T, Activation kind, bool gated>
void backward(Exec& exec, const ActivationBackward& a) {
  const int64_t n = a.dout.dim(0), f = a.dout.dim(1);
  cpu::parallel_for(
      exec.threads, n, std::max<int64_t>(1, grain_elements / f), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          const T* dout = data_of<const T>(a.dout) + r * a.dout.stride[0];
          const T* x = data_of<const T>(a.x) + r * a.x.stride[0];
          T* dx = data_of<T>(a.dx) + r * a.dx.stride[0];
          if (!a.out) {
            backward_elements<T, kind, gated>(dout, x, dx, f, 0, f);
            continue;
          }
          // Two loops per block: the compiler would contract one loop in other ways than the forward pass's.
          constexpr int64_t block = 1024;
          T made[block];
          T* out = data_of<T>(a.out) + r * a.out.stride[0];
          for (int64_t i = 0; i < f; i += block) {
            const int64_t count = std::min(block, f - i);
            forward_elements<T, kind, gated>(x, f, i, count, made);
            backward_elements<T, kind, gated>(dout, x, dx, f, i, count);
            std::memcpy(static_cast<void*>(out + i), made, static_cast<size_t>(count) * sizeof(T));
          }
        }
      });
}

template <class Body>
void with_kind(Activation kind, const Body& body) {
  switch (kind) {
    case Activation::none:
      return body.template operator()<Activation::none>();
    case Activation::silu:
      return body.template operator()<Activation::silu>();
    case Activation::gelu_tanh:
      return body.template operator()<Activation::gelu_tanh>();
    case Activation::gelu_erf:
      return body.template operator()<Activation::gelu_erf>();
  }
}

void activation_forward_kernel(Exec& exec, const ActivationForward& a) {
  for_float_type(a.x.dtype, [&]<class T>() {
    with_kind(a.kind, [&]<Activation kind>() {
      a.gated ? forward<T, kind, true>(exec, a) : forward<T, kind, false>(exec, a);
    });
  });
}

void activation_backward_kernel(Exec& exec, const ActivationBackward& a) {
  for_float_type(a.x.dtype, [&]<class T>() {
    with_kind(a.kind, [&]<Activation kind>() {
      a.gated ? backward<T, kind, true>(exec, a) : backward<T, kind, false>(exec, a);
    });
  });
}

}  // namespace

void fill_activation(KernelTable& table) {
  table.activation_forward = activation_forward_kernel;
  table.activation_backward = activation_backward_kernel;
}

}  // namespace nrl::ops::NRL_ISA
