#pragma once
// Attention problems as the training step of a model has them.

#include <cmath>

#include "core/ops/attention_engine.h"

namespace nrl::ops::attention {

/// Where a block has its q, k and v: columns of one buffer, or with normalized q and k these in a buffer of
/// their own. dq, dk and dv are always columns of one.
enum class Columns { qkv, qk_and_v };

inline Problem training_problem(Direction direction, int64_t tokens, int64_t sequences,
                                const SequenceLengths& lengths, int64_t heads, int64_t kv_heads, int64_t d,
                                bool causal = true, int64_t window = 0, Columns columns = Columns::qkv) {
  Problem p;
  p.direction = direction;
  p.queries = p.keys = tokens;
  p.sequences = sequences;
  p.query = p.key = {.rows = lengths.longest, .step = lengths.equal ? lengths.longest : 0};
  p.equal = lengths.equal;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.d = d;
  p.causal = causal;
  p.window = window;
  p.scale = 1.0f / std::sqrt(static_cast<float>(d));
  const HeadSteps fused{(heads + 2 * kv_heads) * d, d};
  p.q = p.k = p.v = fused;
  if (columns == Columns::qk_and_v) p.q = p.k = {(heads + kv_heads) * d, d};
  p.out = {heads * d, d};
  p.lse_row = tokens;
  if (direction == Direction::backward) {
    p.dout = p.out;
    p.dq = p.dk = p.dv = fused;
  }
  return p;
}

/// A call of context parallelism with whole samples: `query` and `key` are blocks of its `queries` and `keys`
/// rows, the statistics columns of those of `local` rows. Queries are columns of a fused buffer, keys and
/// values side by side in one of their own, results dense.
inline Problem other_keys_problem(Direction direction, int64_t samples, int64_t queries,
                                  const RowBlocks& query, int64_t keys, const RowBlocks& key, int64_t local,
                                  int64_t heads, int64_t kv_heads, int64_t d, bool causal,
                                  int64_t window = 0) {
  Problem p =
      training_problem(direction, queries, samples, {query.rows, true}, heads, kv_heads, d, causal, window);
  p.keys = keys;
  p.self = false;
  p.query = query;
  p.key = key;
  p.lse_row = local;
  p.k = p.v = {2 * kv_heads * d, d};
  if (direction == Direction::backward) {
    p.dq = {heads * d, d};
    p.dk = p.dv = p.k;
  }
  return p;
}

/// A step of a ring: chunks of `chunk` rows, keys of an earlier rank (its low chunks) or a later one (for the
/// high chunks of queries).
inline Problem ring_problem(Direction direction, int64_t samples, int64_t chunk, bool earlier, int64_t heads,
                            int64_t kv_heads, int64_t d) {
  const int64_t rows = 2 * chunk, local = samples * rows;
  const RowBlocks all{.rows = rows, .step = rows}, low{.rows = chunk, .step = rows},
      high{.first = samples == 1 ? 0 : chunk, .rows = chunk, .step = rows};
  const int64_t part = samples == 1 ? chunk : local;  // with one sample only the chunk is passed
  return earlier
             ? other_keys_problem(direction, samples, local, all, part, low, local, heads, kv_heads, d, false)
             : other_keys_problem(direction, samples, part, high, local, all, local, heads, kv_heads, d,
                                  false);
}

/// The call of a chunk that has `before` keys before its own, of gathered keys.
inline Problem gather_problem(Direction direction, int64_t chunk, int64_t before, int64_t heads,
                              int64_t kv_heads, int64_t d, int64_t window = 0) {
  const int64_t keys = before + chunk;
  return other_keys_problem(direction, 1, chunk, {.rows = chunk, .step = chunk}, keys,
                            {.rows = keys, .step = keys}, 2 * chunk, heads, kv_heads, d, true, window);
}

}  // namespace nrl::ops::attention
