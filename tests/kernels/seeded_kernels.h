#pragma once
// Kernels with one fault each, which `fixed` corrects; seeded_bugs.cpp runs them.

#include <cmath>
#include <vector>

#include "core/device/kernel.h"

namespace {

using nrl::kernel::all_lanes;
using nrl::kernel::load_floats;

constexpr int threads = 64;
constexpr int blocks = 8;

/// Global memory of the kernels; `out` and `in` have exactly the elements that a correct kernel may touch.
struct Memory {
  std::vector<float> out = std::vector<float>(threads * blocks, 0.0f);
  std::vector<float> in = std::vector<float>(4 * threads, 2.0f);
  unsigned arrived[2] = {};
};

// --- shared memory and barriers ------------------------------------------------------------------

__global__ void read_after_write(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  s[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (fixed) __syncthreads();
  out[threadIdx.x] = s[threads - 1 - threadIdx.x];
}

__global__ void write_after_read(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  for (int i = 0; i < 2; ++i) {
    s[threadIdx.x] = static_cast<float>(i);
    __syncthreads();
    out[threadIdx.x] += s[threads - 1 - threadIdx.x];
    if (fixed) __syncthreads();
  }
}

__global__ void unwritten(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  if (fixed || threadIdx.x < threads - 1) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}

__global__ void unwritten_dynamic(float* out, bool fixed) {
  NRL_DYN_SHARED(float, s);
  if (fixed || threadIdx.x > 0) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}

__global__ void divergent_barrier(float* out, bool fixed) {
  if (fixed) __syncthreads();
  if (threadIdx.x < threads / 2) {
    if (!fixed) __syncthreads();
    out[threadIdx.x] = 1;
  } else {
    if (!fixed) __syncthreads();
    out[threadIdx.x] = 2;
  }
}

__global__ void deadlock(float* out, bool fixed) {
  // Without the other lanes of its mask, the first warp waits for ever; the second waits for the first.
  if (threadIdx.x == 0 || fixed) __syncwarp();
  if (threadIdx.x == 1 && !fixed) __syncthreads();
  if (threadIdx.x >= 32 || fixed) __syncthreads();
  out[threadIdx.x] = 1;
}

// --- warps ---------------------------------------------------------------------------------------

__global__ void lane_not_in_mask(float* out, bool fixed) {
  if (threadIdx.x < 8) out[threadIdx.x] = __shfl_xor_sync(fixed ? 0xffu : 0x0fu, 1.0f, 1);
}

__global__ void inactive_lane(float* out, bool fixed) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(0xffffu, 1.0f, 8, fixed ? 16 : 32);
}

__global__ void mixed_operations(float* out, bool fixed) {
  if (fixed || threadIdx.x % 2 == 0) {
    out[threadIdx.x] = __shfl_xor_sync(all_lanes, 1.0f, 1);
  } else {
    out[threadIdx.x] = static_cast<float>(__ballot_sync(all_lanes, 1));
  }
}

__global__ void missing_syncwarp(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  s[threadIdx.x] = 1;
  if (fixed) __syncwarp();
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}

/// Shuffles, votes and matrix operations exchange values; they order no memory.
__global__ void shuffle_for_syncwarp(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  s[threadIdx.x] = 1;
  const float one = __shfl_xor_sync(all_lanes, 1.0f, 1);
  if (fixed) __syncwarp();
  out[threadIdx.x] = s[threadIdx.x ^ 1] * one;
}

__global__ void vote_for_syncwarp(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  s[threadIdx.x] = 1;
  const unsigned votes = __ballot_sync(all_lanes, 1);
  if (fixed) __syncwarp();
  out[threadIdx.x] = s[threadIdx.x ^ 1] * static_cast<float>(votes);
}

__global__ void mma_for_syncwarp(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  s[threadIdx.x] = 1;
  const unsigned a[4] = {}, b[1][2] = {};
  float d[1][4] = {};
  nrl_mma_m16n8k16<nrl::bf16, 1>(d, a, b);
  if (fixed) __syncwarp();
  out[threadIdx.x] = s[threadIdx.x ^ 1] + d[0][0];
}

/// The write happens after a shuffle of what other lanes read before: only their values are ordered.
__global__ void write_after_shuffle(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads / 32]);
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = 1;
  __syncwarp();
  const float sum = nrl::kernel::warp_sum(s[threadIdx.x / 32]);
  if (fixed) __syncwarp();
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = sum;
  out[threadIdx.x] = sum;
}

/// A lane that has returned takes part in no operation.
__global__ void syncwarp_after_exit(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  s[threadIdx.x] = 1;
  if (fixed) __syncwarp();
  if (threadIdx.x % 32 == 31) return;
  __syncwarp();
  out[threadIdx.x] = s[threadIdx.x + 1];
}

// --- asynchronous copies -------------------------------------------------------------------------

__global__ void missing_wait(float* out, const float* in, bool fixed) {
  NRL_SHARED(uint4, s, [threads]);
  nrl_cp_async16(&s[threadIdx.x], in + threadIdx.x * 4);
  nrl_cp_async_commit();
  if (fixed) nrl_cp_async_wait<0>();
  out[threadIdx.x] = reinterpret_cast<const float4*>(s)[threadIdx.x].x;
  nrl_cp_async_wait<0>();
}

__global__ void wait_for_too_few(float* out, const float* in, bool fixed) {
  NRL_SHARED(uint4, s, [2][threads]);
  for (int stage = 0; stage < 2; ++stage) {
    nrl_cp_async16(&s[stage][threadIdx.x], in + threadIdx.x * 4);
    nrl_cp_async_commit();
  }
  if (fixed) {
    nrl_cp_async_wait<0>();
  } else {
    nrl_cp_async_wait<1>();
  }
  out[threadIdx.x] = reinterpret_cast<const float4*>(s[1])[threadIdx.x].x;
}

__global__ void wait_without_barrier(float* out, const float* in, bool fixed) {
  NRL_SHARED(uint4, s, [threads]);
  nrl_cp_async16(&s[threadIdx.x], in + threadIdx.x * 4);
  nrl_cp_async_commit();
  nrl_cp_async_wait<0>();
  if (fixed) __syncthreads();
  out[threadIdx.x] = reinterpret_cast<const float4*>(s)[threads - 1 - threadIdx.x].x;
}

/// Two buffers in turn. The one that is not waited for has an older tile, not NaN from the start.
__global__ void missing_wait_of_a_stage(float* out, const float* in, bool fixed) {
  NRL_SHARED(uint4, s, [2][threads]);
  for (int tile = 0; tile < 4; ++tile) {
    if (tile == 0) {
      nrl_cp_async16(&s[0][threadIdx.x], in + threadIdx.x * 4);
      nrl_cp_async_commit();
    }
    if (fixed || tile < 2) nrl_cp_async_wait<0>();
    __syncthreads();
    if (tile < 3) nrl_cp_async16(&s[(tile + 1) % 2][threadIdx.x], in + threadIdx.x * 4);
    nrl_cp_async_commit();
    out[threadIdx.x] += reinterpret_cast<const float4*>(s[tile % 2])[threadIdx.x].x;
  }
  nrl_cp_async_wait<0>();
}

/// The next tile is copied over one that another warp may still be reading.
__global__ void copy_over_a_tile_in_use(float* out, const float* in, bool fixed) {
  NRL_SHARED(uint4, s, [threads]);
  nrl_cp_async16(&s[threadIdx.x], in + threadIdx.x * 4);
  nrl_cp_async_commit();
  nrl_cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = reinterpret_cast<const float4*>(s)[threads - 1 - threadIdx.x].x;
  if (fixed) __syncthreads();
  nrl_cp_async16(&s[threadIdx.x], in + threadIdx.x * 4);
  nrl_cp_async_commit();
  __syncthreads();
  nrl_cp_async_wait<0>();
}

// --- matrices in shared memory -------------------------------------------------------------------

__device__ __forceinline__ float first_of_matrix(const void* row) {
  unsigned f[4];
  nrl_ldmatrix_x4<false>(f, row, 0);
  return __uint_as_float(f[0]);
}

__global__ void misaligned_matrix(float* out, bool fixed) {
  NRL_SHARED(uint4, s, [threads + 1]);
  s[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  out[threadIdx.x] = first_of_matrix(reinterpret_cast<const char*>(&s[threadIdx.x]) + (fixed ? 0 : 8));
}

__global__ void matrix_outside_tile(float* out, bool fixed) {
  NRL_DYN_SHARED(uint4, s);
  s[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  out[threadIdx.x] = first_of_matrix(&s[threadIdx.x + (fixed ? 0 : 1)]);
}

__global__ void matrix_before_barrier(float* out, bool fixed) {
  NRL_SHARED(uint4, s, [threads]);
  s[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (fixed) __syncthreads();
  out[threadIdx.x] = first_of_matrix(&s[(threadIdx.x + 32) % threads]);
}

/// A warp overwrites rows that its other lanes may still be loading.
__global__ void matrix_overwritten(float* out, bool fixed) {
  NRL_SHARED(uint4, s, [threads]);
  s[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncwarp();
  out[threadIdx.x] = first_of_matrix(&s[threadIdx.x]);
  if (fixed) __syncwarp();
  s[threadIdx.x] = make_uint4(1, 1, 1, 1);
}

// --- blocks in turn ------------------------------------------------------------------------------

/// Each block adds to a sum after the block before it; `arrived` is the counter of turns.
__global__ void sum_out_of_turn(float* out, unsigned* arrived, bool fixed) {
  NRL_SHARED(unsigned, ticket, [1]);
  if (threadIdx.x == 0) ticket[0] = atomicAdd(arrived + 1, 1u);
  __syncthreads();
  if (fixed && threadIdx.x == 0) nrl_wait_for_signal(arrived, ticket[0], "its turn");
  __syncthreads();
  out[threadIdx.x] += 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) nrl_signal(arrived, ticket[0] + 1);
}

/// The numbers of blocks instead of tickets: the GPU may start the others first and have no room for this
/// one.
__global__ void turn_without_ticket(float* out, unsigned* arrived, bool fixed) {
  if (threadIdx.x != 0) return;
  const unsigned number = fixed ? atomicAdd(arrived + 1, 1u) : gridDim.x - 1 - blockIdx.x;
  nrl_wait_for_signal(arrived, number, "its turn");
  out[0] += 1.0f;
  nrl_signal(arrived, number + 1);
}

/// The last block but one sends no signal to the last one.
__global__ void missing_signal(float* out, unsigned* arrived, bool fixed) {
  if (threadIdx.x != 0) return;
  const unsigned number = atomicAdd(arrived + 1, 1u);
  if (number > 0) nrl_wait_for_signal(arrived, number, "its turn");
  out[0] += 1.0f;
  if (fixed || number < blocks - 2) nrl_signal(arrived, number + 1);
}

enum class Turn { not_awaited, relaxed_signal, relaxed_wait, signal_before_barrier, one_lane_waits };

/// Blocks count in `sums` in the order of their tickets, as the backward pass of attention adds. `arrived`:
/// the turn and the counter of tickets.
template <Turn bug>
__global__ void take_turns(float* sums, unsigned* arrived, bool fixed) {
  NRL_SHARED(unsigned, ticket, [1]);
  if (threadIdx.x == 0) ticket[0] = atomicAdd(arrived + 1, 1u);
  __syncthreads();
  const unsigned mine = ticket[0];
  if (threadIdx.x % 32 == 0 && (bug != Turn::not_awaited || fixed)) {
    if (bug == Turn::relaxed_wait && !fixed) {
      while (atomicAdd(arrived, 0u) != mine) {
      }
    } else {
      nrl_wait_for_signal(arrived, mine, "its turn");
    }
  }
  // After the shuffle all lanes have waited, but their accesses are not ordered.
  unsigned counted = __shfl_sync(all_lanes, 1u, 0);
  if (bug != Turn::one_lane_waits || fixed) __syncwarp();
  const float before = __ldcg(&sums[threadIdx.x]);
  const bool in_turn = static_cast<unsigned>(before) % gridDim.x == mine;
  __stcg(&sums[threadIdx.x], in_turn ? before + static_cast<float>(counted) : NAN);
  const bool early = bug == Turn::signal_before_barrier && !fixed;
  if (early && threadIdx.x == 0) nrl_signal(arrived, mine + 1);
  __syncthreads();
  if (early || threadIdx.x != 0) return;
  if (bug == Turn::relaxed_signal && !fixed) {
    atomicExch(arrived, mine + 1);
  } else {
    nrl_signal(arrived, mine + 1);
  }
}

// --- races between blocks ------------------------------------------------------------------------

__global__ void block_race(float* out, bool fixed) {
  if (threadIdx.x != 0) return;
  if (fixed) {
    atomicAdd(out, 1.0f);
  } else {
    out[0] += 1.0f;
  }
}

// --- bounds and alignment ------------------------------------------------------------------------

__global__ void outside_static(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  float* row = s;
  row[threadIdx.x + (fixed ? 0 : 1)] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}

__global__ void outside_dynamic(float* out, bool fixed) {
  NRL_DYN_SHARED(float, s);
  s[threadIdx.x + (fixed ? 0 : 1)] = 1;
  __syncthreads();
  out[threadIdx.x] = fixed ? s[threadIdx.x] : 0;
}

__global__ void outside_global(float* out, bool fixed) {
  out[blockIdx.x * blockDim.x + threadIdx.x + (fixed ? 0 : 1)] = 1;
}

__global__ void outside_local(float* out, bool fixed) {
  float values[4];
  for (int i = 0; i < 4; ++i) values[i] = 1;
  out[threadIdx.x] = values[(threadIdx.x + 1) % (fixed ? 4 : 5)];
}

/// One access of 16 bytes.
__device__ __forceinline__ float first_of_four(const float* p) {
  float v[4];
  load_floats(p, v);
  return v[0];
}

__global__ void vector_past_the_end(float* out, const float* in, bool fixed) {
  out[threadIdx.x] = first_of_four(in + (threadIdx.x + (fixed ? 0 : 1)) * 4);
}

__global__ void copy_past_the_end(float* out, const float* in, bool fixed) {
  NRL_SHARED(uint4, s, [threads]);
  nrl_cp_async16(&s[threadIdx.x + (fixed ? 0 : 1)], in + threadIdx.x * 4);
  nrl_cp_async_commit();
  nrl_cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void misaligned_global(float* out, const float* in, bool fixed) {
  out[threadIdx.x] = first_of_four(in + threadIdx.x * 2 - threadIdx.x % 2 * (fixed ? 2 : 0));
}

__global__ void misaligned_shared(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  NRL_SHARED(float4, v, [threads]);
  s[threadIdx.x] = 1;
  v[threadIdx.x] = make_float4(1, 1, 1, 1);
  __syncthreads();
  out[threadIdx.x] = first_of_four(fixed ? reinterpret_cast<const float*>(v) : s);
}

/// Without a check of the simulator's: an ordinary access through a cast.
__global__ void misaligned_plain(float* out, const float* in, bool fixed) {
  const char* const bytes = reinterpret_cast<const char*>(in) + (fixed ? 0 : 2);
  out[threadIdx.x] = static_cast<float>(reinterpret_cast<const unsigned*>(bytes)[threadIdx.x] & 1);
}

/// Offsets of large tensors must be computed in 64 bits.
__global__ void overflowing_offset(float* out, int row, int columns, bool fixed) {
  const int64_t offset = fixed ? static_cast<int64_t>(row) * columns : row * columns;
  if (offset < 0) out[threadIdx.x] = 1;
}

// --- what the hardware refuses -------------------------------------------------------------------

__global__ void nothing(float* out) {
  if (blockIdx.y == 0 && threadIdx.z == 0) out[threadIdx.x] = 1;
}

__global__ void much_static(float* out, bool fixed) {
  NRL_SHARED(float, a, [8 * 1024]);
  a[threadIdx.x] = 1;
  if (!fixed) {
    NRL_SHARED(float, b, [8 * 1024]);
    b[threadIdx.x] = 1;
  }
  out[threadIdx.x] = a[threadIdx.x];
}

}  // namespace
