// Activations of the MLP on the CPU; formulas in core/ops/activation.h. Rows are split over the threads.

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/element.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t grain_elements = 8192;

template <class T, Activation kind, bool gated>
void forward(Exec& exec, const ActivationForward& a) {
  const int64_t n = a.out.dim(0), f = a.out.dim(1);
  cpu::parallel_for(exec.threads, n, std::max<int64_t>(1, grain_elements / f),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t r = begin; r < end; ++r) {
                        const T* x = data_of<const T>(a.x) + r * a.x.stride[0];
                        T* out = data_of<T>(a.out) + r * a.out.stride[0];
#pragma omp simd
                        for (int64_t i = 0; i < f; ++i) {
                          float y = element::activation<SimdMath, kind>(static_cast<float>(x[i])).value;
                          if constexpr (gated) y *= static_cast<float>(x[f + i]);
                          store(out[i], y);
                        }
                      }
                    });
}

template <class T, Activation kind, bool gated>
void backward(Exec& exec, const ActivationBackward& a) {
  const int64_t n = a.dout.dim(0), f = a.dout.dim(1);
  cpu::parallel_for(exec.threads, n, std::max<int64_t>(1, grain_elements / f),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t r = begin; r < end; ++r) {
                        const T* dout = data_of<const T>(a.dout) + r * a.dout.stride[0];
                        const T* x = data_of<const T>(a.x) + r * a.x.stride[0];
                        T* dx = data_of<T>(a.dx) + r * a.dx.stride[0];
#pragma omp simd
                        for (int64_t i = 0; i < f; ++i) {
                          const float g = static_cast<float>(dout[i]), v = static_cast<float>(x[i]);
                          if constexpr (gated) {
                            const element::GatedGradient d =
                                element::gated_gradient<SimdMath, kind>(v, static_cast<float>(x[f + i]), g);
                            store(dx[i], d.dgate);
                            store(dx[f + i], d.dup);
                          } else {
                            store(dx[i], g * element::activation<SimdMath, kind>(v).slope);
                          }
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
