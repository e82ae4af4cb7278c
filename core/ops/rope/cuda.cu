// Rotary embedding on the GPU, in place (=): (x1, x2) = (x1 cos - x2 sin, x2 cos + x1 sin) for the pairs (i,
// i + half) of every head. A thread has a pack of E pairs (16 bytes) of heads_per_thread heads; the grid
// strides over the work. If it is wanted, amax = max(amax, |x|) of these pairs.

#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/amax.cuh"
#include "core/ops/shared/gpu/rotation.cuh"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

constexpr int threads = 256;
/// Heads of a token that a thread rotates with the cosines and sines it holds.
constexpr int heads_per_thread = 4;

template <class T>
struct RopeArguments {
  T* x;
  int64_t token_stride, head_stride;
  int heads;
  Rotation rotation;
  unsigned* amax;            ///< the bits of a float >= 0, or null
  Divider packs_per_half;    ///< packs in half of a head
  Divider groups_per_token;  ///< groups of heads_per_thread heads
  int64_t work;              ///< tokens * groups_per_token * packs_per_half
};

template <class T, int E>
__global__ void __launch_bounds__(threads) rope_kernel(RopeArguments<T> a) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * threads;
  unsigned amax = 0;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x; item < a.work;
       item += stride) {
    const int64_t task = a.packs_per_half.quotient(item), token = a.groups_per_token.quotient(task);
    const auto column = static_cast<int>(item - task * a.packs_per_half.divisor()) * E;
    const auto head = static_cast<int>(task - token * a.groups_per_token.divisor()) * heads_per_thread;
    T* x = a.x + token * a.token_stride + head * a.head_stride + column;
    Pack<T, E> first[heads_per_thread], second[heads_per_thread];
#pragma unroll
    for (int h = 0; h < heads_per_thread; ++h) {
      if (head + h >= a.heads) continue;
      first[h].load(x + h * a.head_stride);
      second[h].load(x + h * a.head_stride + a.rotation.half);
    }
    float cosines[E], sines[E];
    a.rotation.angles(token, column, cosines, sines);
#pragma unroll
    for (int h = 0; h < heads_per_thread; ++h) {
      if (head + h >= a.heads) continue;
      float u[E], v[E];
      first[h].get(u);
      second[h].get(v);
      rotate(u, v, cosines, sines);
#pragma unroll
      for (int i = 0; i < E; ++i) amax = max_magnitude(max_magnitude(amax, u[i]), v[i]);
      first[h].set(u);
      second[h].set(v);
      first[h].store(x + h * a.head_stride);
      second[h].store(x + h * a.head_stride + a.rotation.half);
    }
  }
  if (a.amax) combine_amax<T>(a.amax, amax);
}

template <class T, int E>
void launch(Exec& exec, const Rope& r) {
  RopeArguments<T> a{};
  a.x = static_cast<T*>(r.x.data);
  a.token_stride = r.x.step(0);
  a.head_stride = r.x.step(1);
  a.heads = static_cast<int>(r.x.dim(1));
  a.rotation = Rotation(r.table, r.positions, r.inverse);
  a.amax = static_cast<unsigned*>(r.amax.data);
  if (a.rotation.half == 0) return;
  const int64_t packs = a.rotation.half / E, groups = (a.heads + heads_per_thread - 1) / heads_per_thread;
  a.packs_per_half = Divider(packs);
  a.groups_per_token = Divider(groups);
  a.work = r.x.dim(0) * packs * groups;
  const unsigned grid = kernel::grid_for(a.work, threads, exec.multiprocessors, 16);
  NRL_LAUNCH((rope_kernel<T, E>), grid, threads, 0, exec.stream, a);
}

void rope_launch(Exec& exec, const Rope& r) {
  for_float_type(r.x.dtype, [&]<class T>() {
    packed_rotation(r.x, r.table) ? launch<T, per_pack<T>>(exec, r) : launch<T, 1>(exec, r);
  });
}

}  // namespace

void fill_rope(KernelTable& table) {
  table.rope = rope_launch;
}

}  // namespace nrl::ops::NRL_GPU
