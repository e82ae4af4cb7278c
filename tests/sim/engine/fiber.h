#pragma once
// Replaces CUDA in kernel files that the host compiler compiles: CUDA's names (cuda_names.h), the built-in
// variables, barriers, warp operations and the macros of kernel.h, all on the engine (engine.h).

#include <cstring>
#include <type_traits>

#include "core/base/dtype.h"
#include "tests/sim/engine/engine.h"

#define NRL_LAUNCH(kernel, grid, block, smem, stream, ...) \
  ::nrl::sim::launch(#kernel, stream, kernel, grid, block, smem __VA_OPT__(, ) __VA_ARGS__)
/// Fixed, so that grids are the same everywhere.
#define NRL_RESIDENT(kernel, threads) 2
#define NRL_SHARED(type, name, ...)                                                          \
  using name##_shared_t = type __VA_ARGS__;                                                  \
  name##_shared_t& name = *static_cast<name##_shared_t*>([]() -> void* {                     \
    static char key;                                                                         \
    return ::nrl::sim::shared_array(&key, sizeof(name##_shared_t), alignof(name##_shared_t), \
                                    ::nrl::sim::Site::current());                            \
  }())
#define NRL_DYN_SHARED(type, name) \
  type* name = reinterpret_cast<type*>(::nrl::sim::current_block->dynamic_shared)
// A plain __shared__ would be neither poisoned nor guarded.
#define __shared__ use_NRL_SHARED_instead

/// The last parameter of a device function that reports its caller's place; nothing under nvcc.
#define NRL_SITE_PARAMETER , const ::nrl::sim::Site& at = ::nrl::sim::Site::current()
/// Passes that place on to a function with NRL_SITE_PARAMETER.
#define NRL_SITE_ARGUMENT , at
/// Fails when `p` is not a multiple of `bytes`; in functions that have NRL_SITE_PARAMETER.
#define NRL_CHECK_ALIGNED(p, bytes) ::nrl::sim::check_aligned(p, bytes, at)

#define threadIdx (::nrl::sim::current_thread->index)
#define blockIdx (::nrl::sim::current_block->index)
#define blockDim (::nrl::sim::current_block->dim)
#define gridDim (::nrl::sim::current_block->grid)
inline constexpr int warpSize = nrl::sim::warp_size;

namespace nrl::sim {

inline void check_aligned(const void* p, size_t bytes, const Site& at) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) [[unlikely]] {
    fail_thread(fmt::format("an access of {} bytes to {}, which is not aligned to them", bytes, p), at);
  }
}

template <class T>
struct Shuffle {
  T in, out;
  int source;

  NRL_EXCHANGE static void apply(void* const* payloads, unsigned lanes) {
    for (int i = 0; i < warp_size; ++i) {
      if (!(lanes >> i & 1)) continue;
      auto* me = static_cast<Shuffle*>(payloads[i]);
      if (lanes >> me->source & 1) {
        me->out = static_cast<const Shuffle*>(payloads[me->source])->in;
      } else {
        me->source = -1;
      }
    }
  }
  static constexpr WarpOp op{"a shuffle", &apply};
};

/// v of lane `source`.
template <class T>
T shuffle(unsigned mask, T v, int source, int width, const Site& at) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA has no such shuffle");
  if (width <= 0 || width > warp_size || (width & (width - 1)) != 0) [[unlikely]] {
    fail_thread(fmt::format("a shuffle of width {}", width), at);
  }
  Shuffle<T> payload{v, v, source};
  collective(mask, Shuffle<T>::op, &payload, at);
  if (payload.source < 0) [[unlikely]] {
    fail_thread(fmt::format("a shuffle reads lane {}, which does not take part", source), at);
  }
  return payload.out;
}
/// The first and last lane of the segment of `width` lanes that the running thread is in.
inline int first_of_segment(int width) {
  return current_thread->lane & ~(width - 1);
}
inline int last_of_segment(int width) {
  return current_thread->lane | (width - 1);
}

struct Vote {
  bool in;
  unsigned out;

  NRL_EXCHANGE static void apply(void* const* payloads, unsigned lanes) {
    unsigned votes = 0;
    for (int i = 0; i < warp_size; ++i) {
      if (lanes >> i & 1 && static_cast<const Vote*>(payloads[i])->in) votes |= 1u << i;
    }
    for (int i = 0; i < warp_size; ++i) {
      if (lanes >> i & 1) static_cast<Vote*>(payloads[i])->out = votes;
    }
  }
  static constexpr WarpOp op{"a vote", &apply};
};
inline unsigned vote(unsigned mask, bool in, const Site& at) {
  Vote payload{in, 0};
  collective(mask, Vote::op, &payload, at);
  return payload.out;
}

struct SyncWarp {
  static void apply(void* const*, unsigned) {}
  static constexpr WarpOp op{"__syncwarp", &apply, false, true};
};

/// mma.sync.aligned.row.col of operands of 16 bits (m16n8k16: bf16 or f16) or 8 (m16n8k32: FP8), with the
/// fragments of the PTX manual: lane l holds rows l/4 and l/4 + 8 of A and of C, and column l/4 of B; the
/// elements in a word are neighboring columns (of A) or rows (of B), of word l % 4 of half of them and of the
/// other half; pairs of columns of C are at 2 * (l % 4).
template <class A, class B, int N>
struct MatrixTile {
  static_assert(sizeof(A) == sizeof(B));
  static constexpr int in_word = 4 / sizeof(A), depth = 8 * in_word;
  const unsigned* a;
  const unsigned (*b)[2];
  float (*d)[4];

  template <class T>
  static float element(unsigned word, int i) {
    T v;
    v.bits = static_cast<decltype(v.bits)>(word >> (32 / in_word * i));
    return v;
  }
  NRL_EXCHANGE static void apply(void* const* payloads, unsigned) {
    float a[16][depth], b[depth][8 * N], d[16][8 * N];
    for (int lane = 0; lane < warp_size; ++lane) {
      const auto* tile = static_cast<const MatrixTile*>(payloads[lane]);
      const int group = lane / 4, word = lane % 4 * in_word, pair = lane % 4 * 2;
      for (int i = 0; i < in_word; ++i) {
        for (int r = 0; r < 4; ++r)
          a[group + r % 2 * 8][word + i + r / 2 * depth / 2] = element<A>(tile->a[r], i);
        for (int n = 0; n < N; ++n)
          for (int r = 0; r < 2; ++r)
            b[word + i + r * depth / 2][n * 8 + group] = element<B>(tile->b[n][r], i);
      }
      for (int n = 0; n < N; ++n)
        for (int i = 0; i < 4; ++i) d[group + i / 2 * 8][n * 8 + pair + i % 2] = tile->d[n][i];
    }
    for (int m = 0; m < 16; ++m)
      for (int k = 0; k < depth; ++k)
        for (int n = 0; n < 8 * N; ++n) d[m][n] += a[m][k] * b[k][n];
    for (int lane = 0; lane < warp_size; ++lane) {
      auto* tile = static_cast<MatrixTile*>(payloads[lane]);
      const int group = lane / 4, pair = lane % 4 * 2;
      for (int n = 0; n < N; ++n)
        for (int i = 0; i < 4; ++i) tile->d[n][i] = d[group + i / 2 * 8][n * 8 + pair + i % 2];
    }
  }
  static constexpr WarpOp op{"mma.sync", &apply, true};
};

/// ldmatrix.sync.aligned.m8n8.x4(.trans).shared.b16. The lanes exchange addresses of rows; each loads its own
/// elements, by weak accesses that only a barrier or __syncwarp orders with stores of other lanes.
template <bool Transposed>
struct MatrixLoad {
  const char* row;
  const char* elements[4][Transposed ? 2 : 1];  ///< in rows of this lane and others, for each matrix

  NRL_EXCHANGE static void apply(void* const* payloads, unsigned) {
    const char* rows[warp_size];
    for (int lane = 0; lane < warp_size; ++lane)
      rows[lane] = static_cast<const MatrixLoad*>(payloads[lane])->row;
    for (int lane = 0; lane < warp_size; ++lane) {
      const int group = lane / 4, pair = lane % 4 * 2;
      for (int m = 0; m < 4; ++m) {
        const char* const* matrix = rows + m * 8;
        auto& mine = static_cast<MatrixLoad*>(payloads[lane])->elements[m];
        if constexpr (Transposed) {
          mine[0] = matrix[pair] + group * 2;
          mine[1] = matrix[pair + 1] + group * 2;
        } else {
          mine[0] = matrix[group] + pair * 2;
        }
      }
    }
  }
  void load(unsigned* f) const {
    for (int m = 0; m < 4; ++m) {
      if constexpr (Transposed) {
        uint16_t low, high;
        std::memcpy(&low, elements[m][0], sizeof low);
        std::memcpy(&high, elements[m][1], sizeof high);
        f[m] = low | static_cast<unsigned>(high) << 16;
      } else {
        std::memcpy(&f[m], elements[m][0], sizeof f[m]);
      }
    }
  }
  static constexpr WarpOp op{"ldmatrix", &apply, true};
};

/// Carries out this thread's copies of groups before `group`.
inline void finish_copies(AsyncCopies& copies, int group) {
  int kept = 0;
  for (int i = 0; i < copies.count; ++i) {
    const AsyncCopies::Copy copy = copies.copy[i];
    if (copy.group < group) {
      *static_cast<::uint4*>(copy.to) = copy.from ? *static_cast<const ::uint4*>(copy.from) : ::uint4{};
    } else {
      copies.copy[kept++] = copy;
    }
  }
  copies.count = kept;
}

}  // namespace nrl::sim

// --- barriers, votes and shuffles under CUDA's names ---------------------------------------------
#define NRL_SITE const nrl::sim::Site& at = nrl::sim::Site::current()
inline void __syncthreads(NRL_SITE) {
  nrl::sim::barrier(0, at);
}
inline int __syncthreads_count(int predicate, NRL_SITE) {
  return nrl::sim::barrier(predicate != 0, at);
}
inline int __syncthreads_or(int predicate, NRL_SITE) {
  return nrl::sim::barrier(predicate != 0, at) != 0;
}
inline int __syncthreads_and(int predicate, NRL_SITE) {
  return nrl::sim::barrier(predicate == 0, at) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, NRL_SITE) {
  nrl::sim::collective(mask, nrl::sim::SyncWarp::op, nullptr, at);
}
inline void __trap(NRL_SITE) {
  nrl::sim::fail_thread("__trap", at);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, NRL_SITE) {
  return nrl::sim::vote(mask, predicate != 0, at);
}
inline int __any_sync(unsigned mask, int predicate, NRL_SITE) {
  return nrl::sim::vote(mask, predicate != 0, at) != 0;
}
inline int __all_sync(unsigned mask, int predicate, NRL_SITE) {
  return nrl::sim::vote(mask, predicate == 0, at) == 0;
}
template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32, NRL_SITE) {
  return nrl::sim::shuffle(mask, v, nrl::sim::first_of_segment(width) | (source & (width - 1)), width, at);
}
// A source outside the segment of `width` lanes is the lane itself.
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, NRL_SITE) {
  const int me = nrl::sim::current_thread->lane, source = me - static_cast<int>(delta);
  return nrl::sim::shuffle(mask, v, source < nrl::sim::first_of_segment(width) ? me : source, width, at);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, NRL_SITE) {
  const int me = nrl::sim::current_thread->lane, source = me + static_cast<int>(delta);
  return nrl::sim::shuffle(mask, v, source > nrl::sim::last_of_segment(width) ? me : source, width, at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, NRL_SITE) {
  const int me = nrl::sim::current_thread->lane, source = me ^ bits;
  return nrl::sim::shuffle(mask, v, source > nrl::sim::last_of_segment(width) ? me : source, width, at);
}

// --- kernel.h's wrappers of PTX ------------------------------------------------------------------
template <class T, int N>
void nrl_mma_m16n8k16(float (*d)[4], const unsigned* a, const unsigned (*b)[2], NRL_SITE) {
  nrl::sim::MatrixTile<T, T, N> tile{a, b, d};
  nrl::sim::collective(0xffffffffu, nrl::sim::MatrixTile<T, T, N>::op, &tile, at);
}
template <class A, class B, int N>
void nrl_mma_m16n8k32(float (*d)[4], const unsigned* a, const unsigned (*b)[2], NRL_SITE) {
  nrl::sim::MatrixTile<A, B, N> tile{a, b, d};
  nrl::sim::collective(0xffffffffu, nrl::sim::MatrixTile<A, B, N>::op, &tile, at);
}
template <bool Transposed>
void nrl_ldmatrix_x4(unsigned* f, const void* base, int offset, NRL_SITE) {
  const char* const row = static_cast<const char*>(base) + offset;
  nrl::sim::check_aligned(row, 16, at);
  if (!nrl::sim::in_shared_memory(row, 16))
    nrl::sim::fail_thread("ldmatrix of memory that is not shared", at);
  nrl::sim::MatrixLoad<Transposed> rows{row, {}};
  nrl::sim::collective(0xffffffffu, nrl::sim::MatrixLoad<Transposed>::op, &rows, at);
  rows.load(f);
}
// The copy happens as late as allowed: in the wait for its group. Until then the destination is NaN, so that
// reading it too early shows even where it has a plausible older tile, and writing it while other threads
// still read that tile is a race.
inline void nrl_cp_async16(void* to, const void* from, bool real = true, NRL_SITE) {
  nrl::sim::check_aligned(to, 16, at);
  nrl::sim::check_aligned(from, 16, at);
  if (!nrl::sim::in_shared_memory(to, 16)) nrl::sim::fail_thread("cp.async to memory that is not shared", at);
  nrl::sim::AsyncCopies& copies = nrl::sim::async_copies();
  if (copies.count == nrl::sim::AsyncCopies::capacity) {
    nrl::sim::fail_thread("more cp.async in flight than the engine holds for one thread", at);
  }
  *static_cast<::uint4*>(to) = {~0u, ~0u, ~0u, ~0u};
  copies.copy[copies.count++] = {to, real ? from : nullptr, copies.group};
}
inline void nrl_cp_async_commit() {
  ++nrl::sim::async_copies().group;
}
template <int N>
void nrl_cp_async_wait() {
  nrl::sim::AsyncCopies& copies = nrl::sim::async_copies();
  nrl::sim::finish_copies(copies, copies.group - N);
}
inline float nrl_exp2(float x) {
  return std::exp2(x);
}
inline float nrl_reciprocal(float x) {
  return 1.0f / x;
}
inline int nrl_opaque(int x) {
  return x;
}
inline void nrl_signal(unsigned* flag, unsigned value) {
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}
inline void nrl_wait_for_signal(const unsigned* flag, unsigned value, const char* waited_for, NRL_SITE) {
  for (nrl::sim::BlockWait wait; __atomic_load_n(flag, __ATOMIC_ACQUIRE) != value;)
    wait.pause(waited_for, at);
}
#undef NRL_SITE
