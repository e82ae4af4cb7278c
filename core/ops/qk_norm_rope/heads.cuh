#pragma once
// How the QK-norm + RoPE kernels map heads to threads; included by cuda.cu alone.

#include "core/ops/kernel_table.h"
#include "core/ops/shared/gpu/rotation.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

/// Up to `count` heads of q, or of k, of one token: what a group of threads has at a time.
template <int count>
struct HeadTask {
  int64_t token;
  int head;   ///< the first, among all of q and k
  int valid;  ///< heads, at most `count`
};

/// The tasks of a launch: first all of q, then all of k. A thread uses the cosines, sines and weights that it
/// holds for all heads of its task.
template <int count>
struct HeadTasks {
  int64_t q_tasks, k_tasks;
  int heads, kv_heads;
  Divider q_groups, k_groups;  ///< tasks of a token

  HeadTasks(int64_t tokens, int64_t q, int64_t k)
      : q_tasks(tokens * ((q + count - 1) / count)),
        k_tasks(tokens * ((k + count - 1) / count)),
        heads(static_cast<int>(q)),
        kv_heads(static_cast<int>(k)),
        q_groups((q + count - 1) / count),
        k_groups((k + count - 1) / count) {}
  __device__ __forceinline__ HeadTask<count> q(int64_t task) const {
    const int64_t token = q_groups.quotient(task);
    const int head = static_cast<int>(task - token * q_groups.divisor()) * count;
    return {token, head, min(count, heads - head)};
  }
  __device__ __forceinline__ HeadTask<count> k(int64_t task) const {
    const int64_t token = k_groups.quotient(task);
    const int head = static_cast<int>(task - token * k_groups.divisor()) * count;
    return {token, heads + head, min(count, kv_heads - head)};
  }
  /// Index of a head in rstd, which has all heads of q, then all heads of k.
  __device__ __forceinline__ int64_t statistic(int64_t tokens, int64_t token, int head) const {
    return head < heads ? token * heads + head : tokens * heads + token * kv_heads + (head - heads);
  }
};

/// The two packs of a head that a thread has: two that are rotated with each other, or two neighbors of the
/// part that is not rotated.
struct Slot {
  int first, second;  ///< columns
  bool valid, rotated;

  template <int E>
  static __device__ __forceinline__ Slot of(int lane, int d, int half) {
    Slot s;
    s.rotated = lane * E < half;
    s.first = s.rotated ? lane * E : 2 * lane * E;
    s.second = s.first + (s.rotated ? half : E);
    s.valid = s.second + E <= d;
    return s;
  }
};

/// Puts the weights of q and then of k into shared memory as floats. All threads of the block must call it.
template <class Arguments>
__device__ __forceinline__ void share_weights(const Arguments& a, float* weights) {
  for (int i = static_cast<int>(threadIdx.x); i < 2 * a.d; i += static_cast<int>(blockDim.x)) {
    float w[1];
    i < a.d ? a.q_weight.get(i, w) : a.k_weight.get(i - a.d, w);
    weights[i] = w[0];
  }
  __syncthreads();
}

/// True when a head consists of slots of 16-byte packs, rotated or not, of at most a warp.
inline bool packed_heads(const Tensor& x, const Tensor& table) {
  const int64_t pack = 16 / size_of(x.dtype), d = x.dim(2);
  return packed_rows(x) && d % (2 * pack) == 0 && d / (2 * pack) <= kernel::warp &&
         (!table.data || packed_rotation(x, table));
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
