#pragma once
// How threads share the heads of q and k: the fused kernels of QK-norm and RoPE; included by cuda.cu alone.

#include "core/ops/kernel_table.h"
#include "core/ops/shared/gpu/rotation.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

/// Heads of one kind (q or k) that one group of threads works on at once.
template <int count>
struct HeadTask {
  int64_t token;
  int head;   ///< the first, among all of q and k
  int valid;  ///< how many of the `count` there are
};

/// Dealing heads to groups of threads: `count` of a token at a time, so that a thread uses the cosines, sines
/// and weights it holds several times. Tasks of q come first, then those of k.
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
  /// The place of a head in rstd: those of q, then those of k.
  __device__ __forceinline__ int64_t statistic(int64_t tokens, int64_t token, int head) const {
    return head < heads ? token * heads + head : tokens * heads + token * kv_heads + (head - heads);
  }
};

/// The two packs of a head that a thread has: a pair of halves that is rotated, or neighbours behind them.
struct Slot {
  int first, second;  ///< columns
  bool valid, turns;

  template <int E>
  static __device__ __forceinline__ Slot of(int lane, int d, int half) {
    Slot s;
    s.turns = lane * E < half;
    s.first = s.turns ? lane * E : 2 * lane * E;
    s.second = s.first + (s.turns ? half : E);
    s.valid = s.second + E <= d;
    return s;
  }
};

/// True when heads can be cut into slots of 16-byte packs: whole pairs of packs, of which whole pairs turn,
/// in at most a warp.
inline bool packed_heads(const Tensor& x, const Tensor& table) {
  const int64_t pack = 16 / size_of(x.dtype), d = x.dim(2);
  return packed_rows(x) && d % (2 * pack) == 0 && d / (2 * pack) <= kernel::warp &&
         (!table.data || packed_rotation(x, table));
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
