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
  p.longest = lengths.longest;
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

}  // namespace nrl::ops::attention
