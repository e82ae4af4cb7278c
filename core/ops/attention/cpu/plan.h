#pragma once
// How attention on the CPU is cut into blocks and tasks, and its scratch memory. Shared by the dispatch
// layer, which must know the workspace before anything runs, and by the kernels of every instruction set.
//
// A task is (sequence, key head, part): all query heads of that key head, against keys and values that it
// packs once. There are several parts only when sequences times key heads are too few for the threads: parts
// of the query rows in the forward pass, of the keys in the backward pass, so that each row of dk and dv has
// one owner and every sum a fixed order.

#include <algorithm>
#include <cstdint>

#include "core/base/error.h"
#include "core/ops/attention.h"
#include "core/ops/shared/scratch.h"

namespace nrl::ops::attention {

inline constexpr int64_t query_block = 64;
inline constexpr int64_t key_block = 64;
inline constexpr int64_t lane_multiple = 16;  ///< D is padded to the widest vector, whichever is used
inline constexpr int64_t bf16_multiple = 32;  ///< the same for products of bf16: whole AMX tiles
/// Queries whose scores are computed at a time: f32 scores that the first-level cache keeps.
inline constexpr int64_t strip_queries = 32;
inline constexpr int64_t tasks_per_thread = 4;
inline constexpr int64_t largest_gpu_d = 256;  ///< head dimension of our own kernels on a GPU

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
constexpr int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

/// Parts that each (sequence, key head) is cut into. Never more for more of them or for shorter sequences,
/// which makes workspace_bytes() an upper bound.
constexpr int64_t parts(int threads, int64_t sequences_times_heads, int64_t longest) {
  if (threads <= 1) return 1;
  const int64_t wanted = ceil_div(tasks_per_thread * threads, std::max<int64_t>(1, sequences_times_heads));
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, longest / (2 * query_block)));
}

/// Floats of one thread's buffers.
struct ForwardBuffers {
  int64_t padded, packed, rows, columns, scores, lanes = query_block;
  ForwardBuffers(int64_t d, int64_t longest)
      : padded(round_up(d, lane_multiple)),
        packed(longest * padded),
        rows(query_block * padded),
        columns(padded * query_block),
        scores(key_block * query_block) {}
  /// K, V; O; Q columns; S; m, l.
  size_t bytes() const {
    return 2 * scratch_bytes(packed) + scratch_bytes(rows) + scratch_bytes(columns) + scratch_bytes(scores) +
           2 * scratch_bytes(lanes);
  }
};

struct BackwardBuffers : ForwardBuffers {
  using ForwardBuffers::ForwardBuffers;
  /// K, V, dK, dV; Q, dO, dQ rows; Q, dO columns; P, dS; lse, delta.
  size_t bytes() const {
    return 4 * scratch_bytes(packed) + 3 * scratch_bytes(rows) + 2 * scratch_bytes(columns) +
           2 * scratch_bytes(scores) + 2 * scratch_bytes(lanes);
  }
};

/// The same where bf16 is multiplied as bf16 (bf16_forward.h, bf16_backward.h): keys in whole blocks, D in
/// whole tiles.
struct Bf16Buffers {
  int64_t padded, key_words, rows, strip_rows;
  Bf16Buffers(int64_t d, int64_t longest)
      : padded(round_up(d, bf16_multiple)),
        key_words(round_up(longest, key_block) * padded / 2),
        rows(query_block * padded),
        strip_rows(strip_queries * padded) {}
  static constexpr int64_t scores = query_block * key_block, strip = strip_queries * key_block;
  static constexpr size_t keep_bytes = scores / 8;  ///< of a bit for each score
  /// Two statistics of the rows; kept probabilities.
  static constexpr size_t row_bytes = 2 * scratch_bytes(query_block) + scratch_bytes(keep_bytes, 1);
};

struct Bf16ForwardBuffers : Bf16Buffers {
  using Bf16Buffers::Bf16Buffers;
  /// K, V; Q; O; S; P; l in 16 parts.
  size_t bytes() const {
    return 2 * scratch_bytes(key_words) + scratch_bytes(strip_rows / 2) + scratch_bytes(rows) +
           scratch_bytes(strip) + scratch_bytes(strip / 2) + scratch_bytes(query_block * lane_multiple) +
           row_bytes;
  }
};

struct Bf16BackwardBuffers : Bf16Buffers {
  using Bf16Buffers::Bf16Buffers;
  /// K twice and V, dK, dV; Q and dO twice, dQ; S, dP, dS; P, dS.
  size_t bytes() const {
    return 3 * scratch_bytes(key_words) + 2 * scratch_bytes(2 * key_words) + 4 * scratch_bytes(rows / 2) +
           scratch_bytes(rows) + 2 * scratch_bytes(strip) + scratch_bytes(strip / 2) +
           2 * scratch_bytes(scores / 2) + row_bytes;
  }
};

/// Floats of the partial dq of one part.
constexpr int64_t partial_dq(int64_t tokens, int64_t heads, int64_t padded) {
  return tokens * heads * padded;
}

inline size_t workspace_bytes(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t d, int64_t longest,
                              int threads) {
  if (tokens == 0 || longest == 0) return scratch_alignment;
  const int64_t padded = round_up(d, lane_multiple);
  const int64_t fewest = ceil_div(tokens, longest);
  const int64_t most = parts(threads, fewest * kv_heads, longest);
  const size_t partial =
      most > 1 ? static_cast<size_t>(most) * scratch_bytes(partial_dq(tokens, heads, padded)) : 0;
  const size_t buffers =
      std::max(BackwardBuffers(d, longest).bytes(), Bf16BackwardBuffers(d, longest).bytes());
  return static_cast<size_t>(threads) * buffers + partial + scratch_alignment;
}

/// Which keys a block of queries sees. Local indices: query i of the block, key j of the block.
/// Visible: j <= i + shift and, with a window, j > i + shift - window.
struct Mask {
  bool causal;
  int64_t window;  ///< 0: none
  int64_t shift;   ///< first query + (keys - queries) - first key

  int64_t key_begin(int64_t i) const {
    return causal && window > 0 ? std::max<int64_t>(0, i + shift - window + 1) : 0;
  }
  int64_t key_end(int64_t i, int64_t keys) const {
    return causal ? std::clamp<int64_t>(i + shift + 1, 0, keys) : keys;
  }
  int64_t query_begin(int64_t j) const { return causal ? std::max<int64_t>(0, j - shift) : 0; }
  int64_t query_end(int64_t j, int64_t queries) const {
    return causal && window > 0 ? std::clamp<int64_t>(j - shift + window, 0, queries) : queries;
  }
  /// Every query of the block sees every key of the block.
  bool full(int64_t queries, int64_t keys) const {
    return !causal || (keys - 1 <= shift && (window == 0 || queries - 1 + shift - window < 0));
  }
};

/// The checked sequence boundaries of one call.
struct Sequences {
  const int32_t* cu_q;
  const int32_t* cu_k;
  int64_t count;
  int64_t longest = 0;  ///< in keys

  Sequences(const char* op, const Tensor& q, const Tensor& k, int64_t queries, int64_t keys)
      : cu_q(static_cast<const int32_t*>(q.data)),
        cu_k(static_cast<const int32_t*>(k.data)),
        count(q.dim(0) - 1) {
    for (const auto& [cu, end] : {std::pair{cu_q, queries}, {cu_k, keys}}) {
      NRL_CHECK(cu[0] == 0 && cu[count] == end, "{}: the boundaries run from {} to {}, there are {} tokens",
                op, cu[0], cu[count], end);
      for (int64_t s = 0; s < count; ++s)
        NRL_CHECK(cu[s] <= cu[s + 1], "{}: boundary {} falls from {} to {}", op, s + 1, cu[s], cu[s + 1]);
    }
    for (int64_t s = 0; s < count; ++s) longest = std::max<int64_t>(longest, cu_k[s + 1] - cu_k[s]);
  }
};

}  // namespace nrl::ops::attention
