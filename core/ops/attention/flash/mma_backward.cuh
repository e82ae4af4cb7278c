#pragma once
// The backward kernel of simt.cuh, which has the formulas, for bf16 on tensor cores; included by cuda.cu
// alone. P and dS are rounded to bf16 for the second GEMMs, all sums are f32.
//
// A block owns a tile of keys and iterates over the query tiles of all heads that see them: S = Q K^T,
// dP = dO V^T, then dV += P^T dO, dK += dS^T Q in registers and dQ += dS K. P and dS go through shared
// memory, because the five GEMMs split their results among the warps in different ways. Q and dO of the next
// step arrive during this one.
//
// dQ of a query tile gets a term from each block that sees it. The blocks add in turn, the one with the last
// keys first: dq_sums has the sum so far and turns[] how many have added; the last one writes dq. The sum has
// one order, whatever the GPU does: the result is bitwise reproducible. Blocks of a head start with the last
// keys and go through the queries in ascending order, so a block finds that its predecessor, which began one
// query tile later, has just left the tile, and rarely waits. A block takes its keys by a ticket: those that
// it waits for have smaller tickets and so are running.
//
//   D    queries  keys  shared KB  ldmatrix per mma  (8 warps, one block per SM)
//   64      64     128      96          0.55
//   96      64     128     128          0.50
//   128     64     128     160          0.45
//   192     64      64     160          0.55
//   256     32      64     136          0.68
// Separate kernels for dq and for dk and dv need 7 GEMMs for 5, with at least as many ldmatrix per mma. What
// one kernel adds is dq_sums: 8 bytes per element of dQ and step from and to L2, 64 KB per 10.5 MFLOP at D
// 128.

#include "core/ops/attention/flash/mma.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

/// How 8 warps split the tiles: `score_warps` among the rows of S and dP, `key_warps` of dK and dV,
/// `query_warps` of dQ, the others among the columns.
template <int D, bool Dropped>
struct BackwardTiles {
  static constexpr int warps = 8, threads = warps * kernel::warp;
  static constexpr int queries = D <= 192 ? 64 : 32, keys = D <= (Dropped ? 96 : 128) ? 128 : 64;
  static constexpr int score_warps = queries == keys ? 4 : 2, key_warps = keys == 128 ? 4 : 2,
                       query_warps = D <= 96 ? 4 : 2;
  static constexpr size_t mask_bytes = Dropped ? queries * keys / attention::keys_per_block : 0;
  static constexpr size_t shared =
      static_cast<size_t>(2 * keys * D + 4 * queries * D + 2 * queries * keys) * sizeof(bf16) + mask_bytes;
};

/// A GEMM of the block whose result has Rows x Columns elements, RowWarps of 8 warps among the rows.
template <int Rows, int Columns, int RowWarps>
struct WarpTile {
  static constexpr int row_warps = RowWarps, column_warps = 8 / RowWarps;
  static constexpr int rows = Rows / 16 / row_warps, pairs = Columns / 16 / column_warps;
  static_assert(rows * row_warps * 16 == Rows && pairs * column_warps * 16 == Columns);
  static __device__ __forceinline__ int row() { return warp_id() / column_warps; }
  static __device__ __forceinline__ int pair() { return warp_id() % column_warps; }
};

/// delta = sum over d of dout * out, one warp per (query, head); and no block has added to dq yet.
__global__ void __launch_bounds__(flash_threads) mma_delta_kernel(FlashArguments<bf16> a, int heads) {
  constexpr int warps = flash_threads / kernel::warp, pack = 8;
  const int lane = lane_id();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * warps + warp_id(), row = at / heads;
  const int head = static_cast<int>(at % heads);
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.tickets = 0;
  if (row >= a.queries) return;
  float sum = 0;
  if (lane * pack < a.d) {
    float dout[pack], out[pack];
    load_floats(a.dout(row, head) + lane * pack, dout);
    load_floats(a.out(row, head) + lane * pack, out);
#pragma unroll
    for (int i = 0; i < pack; ++i) sum += dout[i] * out[i];
  }
  sum = kernel::warp_sum(sum);
  if (lane != 0) return;
  a.delta[head * a.queries + row] = sum;
  a.turns[head * a.queries + row] = 0;
}

/// Writes zeros to dq of queries that see no key: whole tiles at the beginning of a sequence with more
/// queries than keys. No block has such a tile among its own.
template <int Queries>
__device__ void clear_blind_queries(const FlashArguments<bf16>& a, const Sequence& s, int kv_head) {
  int blind = 0;
  if (s.keys == 0) {
    blind = s.queries;
  } else if (a.causal && s.shift < 0) {
    blind = -s.shift / Queries * Queries;
  }
  const int rows = min(blind, s.queries) * a.group, units = a.d / 8;
  for (int row = warp_id(); row < rows; row += static_cast<int>(blockDim.x) / kernel::warp)
    if (lane_id() < units)
      Pack<bf16>().store(a.dq(s.q_begin + row / a.group, kv_head * a.group + row % a.group) + lane_id() * 8);
}

/// Rounds a warp's part of P or dS to bf16 in shared memory, rows of Keys elements.
template <class Tile, int Keys>
__device__ __forceinline__ void store_rounded(bf16* to, const float (*part)[2 * Tile::pairs][4]) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  char* const row = reinterpret_cast<char*>(to + (Tile::row() * 16 + g) * Keys + 2 * t);
  const int lane_swizzle = (Tile::pair() * 2 ^ swizzle<Keys>(g)) * 16;
#pragma unroll
  for (int m = 0; m < Tile::rows; ++m)
#pragma unroll
    for (int n = 0; n < 2 * Tile::pairs; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int unit = n / 2 * 2 * Tile::column_warps + n % 2;
        const unsigned u = pack_bf16(part[m][n][2 * half], part[m][n][2 * half + 1]);
        memcpy(row + (m * Tile::row_warps * 16 + half * 8) * Keys * 2 + unit / 8 * 128 +
                   (unit % 8 * 16 ^ lane_swizzle),
               &u, sizeof u);
      }
}

/// Four consecutive floats of dq_sums per lane: two accumulators of a row in each of two tiles.
template <class Tile, class Access>
__device__ __forceinline__ void for_dq_sums(const FlashArguments<bf16>& a, const Sequence& s, int head,
                                            int q0, const Access& access) {
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int m = 0; m < Tile::rows; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = q0 + (m * Tile::row_warps + Tile::row()) * 16 + half * 8 + g;
      if (row >= s.queries) continue;
      float* const sums = a.dq_sums + (head * a.queries + s.q_begin + row) * a.d + 4 * t;
#pragma unroll
      for (int n = 0; n < Tile::pairs; ++n) {
        const int column = (n * Tile::column_warps + Tile::pair()) * 16;
        if (column < a.d) access(reinterpret_cast<float4*>(sums + column), m, n, half);
      }
    }
}

/// D: the head dimension rounded up. Dropped: with dropout of the probabilities.
template <int D, bool Dropped>
__global__ void __launch_bounds__(BackwardTiles<D, Dropped>::threads)
    mma_backward_kernel(FlashArguments<bf16> a, int blocks, int kv_heads) {
  using Tiles = BackwardTiles<D, Dropped>;
  constexpr int tile_q = Tiles::queries, tile_k = Tiles::keys, threads = Tiles::threads;
  using ScoreTile = WarpTile<tile_q, tile_k, Tiles::score_warps>;
  using KeyTile = WarpTile<tile_k, D, Tiles::key_warps>;
  using QueryTile = WarpTile<tile_q, D, Tiles::query_warps>;
  NRL_SHARED(unsigned, ticket, [1]);
  if (threadIdx.x == 0) ticket[0] = atomicAdd(a.tickets, 1u);
  __syncthreads();
  const int order = static_cast<int>(ticket[0]), block = blocks - 1 - order % blocks,
            kv_head = order / blocks % kv_heads;
  const Sequence s(a, order / blocks / kv_heads);
  if (block == 0) clear_blind_queries<tile_q>(a, s, kv_head);
  const int k0 = block * tile_k;
  if (k0 >= s.keys) return;

  NRL_DYN_SHARED(bf16, memory);
  constexpr int stage = 2 * tile_q * D;  // q and dout
  bf16 *const k = memory, *const v = k + tile_k * D, *const probs = v + tile_k * D,
              *const dscores = probs + tile_q * tile_k, *const stages = dscores + tile_q * tile_k;
  [[maybe_unused]] auto* const mask = reinterpret_cast<unsigned char*>(stages + 2 * stage);
  const float scale_log2 = a.scale * log2_e;
  int64_t first_query, end_query;
  query_range(a, s, k0, tile_k, tile_q, first_query, end_query);
  const int begin = static_cast<int>(first_query),
            tiles = static_cast<int>((max(end_query, first_query) - first_query + tile_q - 1) / tile_q),
            steps = tiles * a.group;
  const auto copy_step = [&](int step) {
    bf16* const q = stages + step % 2 * stage;
    const int head = kv_head * a.group + step / tiles, q0 = begin + step % tiles * tile_q;
    copy_tile<D, tile_q, threads>(q, a.q, s.q_begin, head, q0, s.queries, a.d);
    copy_tile<D, tile_q, threads>(q + tile_q * D, a.dout, s.q_begin, head, q0, s.queries, a.d);
  };
  copy_tile<D, tile_k, threads>(k, a.k, s.k_begin, kv_head, k0, s.keys, a.d);
  copy_tile<D, tile_k, threads>(v, a.v, s.k_begin, kv_head, k0, s.keys, a.d);
  if (steps > 0) copy_step(0);
  nrl_cp_async_commit();

  float dk[KeyTile::rows][2 * KeyTile::pairs][4] = {}, dv[KeyTile::rows][2 * KeyTile::pairs][4] = {};
  // Blocks last_block to first_block add to the dq of a query tile, in this order.
  const auto block_range = [&](int q0, int& first_block, int& last_block) {
    int first_key, end_key;
    key_range(a, s, q0, tile_q, tile_k, first_key, end_key);
    first_block = first_key / tile_k;
    last_block = (end_key - 1) / tile_k;
  };
  const auto turn_of = [&](int step) {
    return a.turns +
           ((kv_head * a.group + step / tiles) * a.queries + s.q_begin + begin + step % tiles * tile_q);
  };
  /// Must follow a barrier after the step.
  const auto pass_turn = [&](int step) {
    if (threadIdx.x != 0) return;
    int first_block, last_block;
    block_range(begin + step % tiles * tile_q, first_block, last_block);
    nrl_signal(turn_of(step), static_cast<unsigned>(last_block - block + 1));
  };

  for (int step = 0; step < steps; ++step) {
    const int head = kv_head * a.group + step / tiles, q0 = begin + step % tiles * tile_q;
    nrl_cp_async_wait<0>();
    __syncthreads();  // Q and dO are there, the previous step is over
    if (step > 0) pass_turn(step - 1);
    if (step + 1 < steps) copy_step(step + 1);
    nrl_cp_async_commit();
    if constexpr (Dropped) {
      a.mask.template draw<tile_q, tile_k>(mask, s, q0, head, k0);
      __syncthreads();
    }
    const bf16 *const q = stages + step % 2 * stage, *const dout = q + tile_q * D;
    // A query past the end has probabilities exp(0 - inf) = 0.
    const int g = lane_id() / 4, t = lane_id() % 4;
    float lse[ScoreTile::rows][2], delta[ScoreTile::rows][2];
#pragma unroll
    for (int m = 0; m < ScoreTile::rows; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = q0 + (m * ScoreTile::row_warps + ScoreTile::row()) * 16 + half * 8 + g;
        const bool real = row < s.queries;
        lse[m][half] = real ? a.lse[head * a.lse_step + s.q_begin + row] * log2_e : INFINITY;
        delta[m][half] = real ? a.delta[head * a.queries + s.q_begin + row] : 0.0f;
      }
    {
      float p[ScoreTile::rows][2 * ScoreTile::pairs][4] = {},
                                   ds[ScoreTile::rows][2 * ScoreTile::pairs][4] = {};
      gemm<D, ScoreTile::rows, ScoreTile::row_warps, ScoreTile::pairs, ScoreTile::column_warps>(
          p, Fragments<D, Operand::a, false>(q, ScoreTile::row(), 0),
          Fragments<D, Operand::b, false>(k, ScoreTile::pair(), 0));
      gemm<D, ScoreTile::rows, ScoreTile::row_warps, ScoreTile::pairs, ScoreTile::column_warps>(
          ds, Fragments<D, Operand::a, false>(dout, ScoreTile::row(), 0),
          Fragments<D, Operand::b, false>(v, ScoreTile::pair(), 0));
      const bool masked = !VisibleKeys(a, s, q0, tile_q).all(k0, tile_k);
#pragma unroll
      for (int m = 0; m < ScoreTile::rows; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = (m * ScoreTile::row_warps + ScoreTile::row()) * 16 + half * 8 + g;
#pragma unroll
          for (int n = 0; n < 2 * ScoreTile::pairs; ++n)
#pragma unroll
            for (int c = 2 * half; c < 2 * half + 2; ++c)
              p[m][n][c] = nrl_exp2(p[m][n][c] * scale_log2 - lse[m][half]);
          if (masked) {
            const VisibleKeys of_row(a, s, q0 + at, 1);
#pragma unroll
            for (int n = 0; n < 2 * ScoreTile::pairs; ++n)
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                const int key =
                    k0 + (n / 2 * ScoreTile::column_warps + ScoreTile::pair()) * 16 + n % 2 * 8 + 2 * t + c;
                if (key < of_row.first || key > of_row.last) p[m][n][2 * half + c] = 0;
              }
          }
#pragma unroll
          for (int n = 0; n < 2 * ScoreTile::pairs; ++n)
#pragma unroll
            for (int c = 2 * half; c < 2 * half + 2; ++c) {
              const float prob = p[m][n][c];
              if constexpr (Dropped) {
                const int key =
                    (n / 2 * ScoreTile::column_warps + ScoreTile::pair()) * 16 + n % 2 * 8 + 2 * t;
                const bool stays = kept<tile_k>(mask, at, key + c % 2);
                if (!stays) p[m][n][c] = 0;
                ds[m][n][c] = stays ? ds[m][n][c] * a.mask.scale : 0.0f;
              }
              ds[m][n][c] = prob * (ds[m][n][c] - delta[m][half]);
            }
        }
      store_rounded<ScoreTile, tile_k>(probs, p);
      store_rounded<ScoreTile, tile_k>(dscores, ds);
    }
    __syncthreads();  // P and dS are there

    int first_block, last_block;
    block_range(q0, first_block, last_block);
    float dq[QueryTile::rows][2 * QueryTile::pairs][4] = {};
    if (block < last_block) {
      if (lane_id() == 0)
        nrl_wait_for_signal(turn_of(step), static_cast<unsigned>(last_block - block),
                            "dq of the key blocks behind its own (mma_backward_kernel, attention)");
      __syncwarp();
      for_dq_sums<QueryTile>(a, s, head, q0, [&](float4* sums, int m, int n, int half) {
        const float4 sum = __ldcg(sums);
        dq[m][2 * n][2 * half] = sum.x;
        dq[m][2 * n][2 * half + 1] = sum.y;
        dq[m][2 * n + 1][2 * half] = sum.z;
        dq[m][2 * n + 1][2 * half + 1] = sum.w;
      });
    }
    gemm<tile_q, KeyTile::rows, KeyTile::row_warps, KeyTile::pairs, KeyTile::column_warps>(
        dv, Fragments<tile_k, Operand::a, true>(probs, 0, KeyTile::row()),
        Fragments<D, Operand::b, true>(dout, 0, KeyTile::pair()));
    gemm<tile_q, KeyTile::rows, KeyTile::row_warps, KeyTile::pairs, KeyTile::column_warps>(
        dk, Fragments<tile_k, Operand::a, true>(dscores, 0, KeyTile::row()),
        Fragments<D, Operand::b, true>(q, 0, KeyTile::pair()));
    gemm<tile_k, QueryTile::rows, QueryTile::row_warps, QueryTile::pairs, QueryTile::column_warps>(
        dq, Fragments<tile_k, Operand::a, false>(dscores, QueryTile::row(), 0),
        Fragments<D, Operand::b, true>(k, 0, QueryTile::pair()));
    if (block > first_block) {
      for_dq_sums<QueryTile>(a, s, head, q0, [&](float4* sums, int m, int n, int half) {
        __stcg(sums, make_float4(dq[m][2 * n][2 * half], dq[m][2 * n][2 * half + 1],
                                 dq[m][2 * n + 1][2 * half], dq[m][2 * n + 1][2 * half + 1]));
      });
    } else {
#pragma unroll
      for (int m = 0; m < QueryTile::rows; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = q0 + (m * QueryTile::row_warps + QueryTile::row()) * 16 + half * 8 + lane_id() / 4;
          store_row<QueryTile::pairs, QueryTile::column_warps>(a.dq(s.q_begin + row, head), row < s.queries,
                                                               a.d, dq[m], half, QueryTile::pair(), a.scale);
        }
    }
  }
  nrl_cp_async_wait<0>();
  __syncthreads();
  if (steps > 0) pass_turn(steps - 1);

  const float dv_scale = Dropped ? a.mask.scale : 1.0f;
#pragma unroll
  for (int m = 0; m < KeyTile::rows; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = k0 + (m * KeyTile::row_warps + KeyTile::row()) * 16 + half * 8 + lane_id() / 4;
      const bool real = row < s.keys;
      store_row<KeyTile::pairs, KeyTile::column_warps>(a.dk(s.k_begin + row, kv_head), real, a.d, dk[m], half,
                                                       KeyTile::pair(), a.scale);
      store_row<KeyTile::pairs, KeyTile::column_warps>(a.dv(s.k_begin + row, kv_head), real, a.d, dv[m], half,
                                                       KeyTile::pair(), dv_scale);
    }
}

/// True if a block of this device can have the shared memory: 99 KB (sm_86, sm_89, sm_120) are too little
/// above D 64.
bool mma_backward_fits(const Exec& exec, const AttentionBackward& a) {
  if (!exec.device) return true;
  size_t needed = 0;
  with_rounded_d(static_cast<int>(a.q.dim(2)), [&](auto rounded) {
    constexpr int D = decltype(rounded)::value;
    needed = a.dropout.p > 0 ? BackwardTiles<D, true>::shared : BackwardTiles<D, false>::shared;
  });
  constexpr size_t ticket_bytes = 128;  // the dynamic part is aligned to it
  return needed + ticket_bytes <= exec.device->properties().shared_memory_optin;
}

void mma_backward(Exec& exec, const AttentionBackward& a) {
  FlashArguments<bf16> f = flash_backward_arguments<bf16>(a);
  const int heads = static_cast<int>(a.q.dim(1)), kv_heads = static_cast<int>(a.k.dim(1));
  const auto rows = static_cast<size_t>(heads * f.queries);
  // The workspace: dq_sums, delta, turns, the counter of tickets.
  f.dq_sums = reinterpret_cast<float*>(exec.workspace.data);
  f.delta = f.dq_sums + rows * static_cast<size_t>(f.d);
  f.turns = reinterpret_cast<unsigned*>(f.delta + rows);
  f.tickets = f.turns + rows;
  NRL_CHECK(reinterpret_cast<std::byte*>(f.tickets + 1) <= exec.workspace.data + exec.workspace.size);
  constexpr int warps = flash_threads / kernel::warp;
  const auto delta_blocks = static_cast<unsigned>(std::max<size_t>(1, (rows + warps - 1) / warps));
  NRL_LAUNCH((mma_delta_kernel), delta_blocks, flash_threads, 0, exec.stream, f, heads);
  with_rounded_d(f.d, [&](auto rounded) {
    constexpr int D = decltype(rounded)::value;
    with_dropout(f.mask, [&](auto dropped) {
      constexpr bool Dropped = decltype(dropped)::value;
      using Tiles = BackwardTiles<D, Dropped>;
      const unsigned blocks = flash_blocks(a, Tiles::keys);
      NRL_LAUNCH((mma_backward_kernel<D, Dropped>),
                 blocks * static_cast<unsigned>(kv_heads) * flash_sequences(a), Tiles::threads, Tiles::shared,
                 exec.stream, f, static_cast<int>(blocks), kv_heads);
    });
  });
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
