#pragma once
// Eight elements at a time, 16 bytes of bf16 or 32 of f32, for kernels whose tensors differ in type.

#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {

inline constexpr int unit_elements = 8;

/// `p` is a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ void load_unit(const T* p, float (&v)[unit_elements]) {
#pragma unroll
  for (int i = 0; i < unit_elements; i += per_pack<T>) {
    Pack<T, per_pack<T>> pack;
    float part[per_pack<T>];
    pack.load(p + i);
    pack.get(part);
#pragma unroll
    for (int k = 0; k < per_pack<T>; ++k) v[i + k] = part[k];
  }
}
template <class T>
__device__ __forceinline__ void store_unit(T* p, const float (&v)[unit_elements]) {
#pragma unroll
  for (int i = 0; i < unit_elements; i += per_pack<T>) {
    Pack<T, per_pack<T>> pack;
    float part[per_pack<T>];
#pragma unroll
    for (int k = 0; k < per_pack<T>; ++k) part[k] = v[i + k];
    pack.set(part);
    pack.store(p + i);
  }
}

}  // namespace nrl::ops::NRL_GPU
