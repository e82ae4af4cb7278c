#pragma once
// A key/value cache in pages, and attention to it. Token t of sequence s has row
// block_table[s, t / page] * page + t % page of the caches: a page lies in one piece, pages of a sequence
// anywhere, and sequences may share pages.

#include "core/ops/exec.h"

namespace nrl::ops {

/// Row n of keys and values becomes row slots[n] of the caches; slots must be distinct. Negative slots: the
/// row is not written.
struct CacheWrite {
  Tensor keys;         ///< (N, W) f32, bf16 or f16; rows may be strided
  Tensor values;       ///< (N, W)
  Tensor slots;        ///< (N) i32, below R
  Tensor key_cache;    ///< (R, W), contiguous, of the same dtype
  Tensor value_cache;  ///< (R, W)
};
void cache_write(Exec& exec, const CacheWrite& a);
Cost cost(const Exec& exec, const CacheWrite& a);

/// out = softmax(scale * q k^T, masked) v for sequences in a paged cache. The rows [cu_q[s], cu_q[s + 1]) of
/// q are the last tokens of sequence s, which has context[s] tokens: row i of them sees itself and all tokens
/// before it, or the last `window` of these. Query head h reads key head h / (heads / kv_heads). The result
/// of a row depends neither on other rows and sequences nor on where the pages lie, to the last bit.
struct AttentionPaged {
  Tensor q;            ///< (N, heads, D) f32, bf16 or f16, D up to 256; rows may be strided
  Tensor keys;         ///< (R, kv_heads, D), contiguous, whole pages
  Tensor values;       ///< (R, kv_heads, D)
  Tensor out;          ///< (N, heads, D)
  Tensor cu_q;         ///< (S + 1) i32, ascending from 0 to N
  Tensor context;      ///< (S) i32: tokens of each sequence, at least its rows of q
  Tensor block_table;  ///< (S, P) i32: the pages of each sequence; unused entries may be anything
  int64_t page = 0;    ///< tokens of a page
  float scale = 1.0f;
  int64_t window = 0;   ///< > 0: tokens that a row sees, itself included
  int64_t longest = 0;  ///< no context is longer, for cost(); 0: unknown
};
void attention_paged(Exec& exec, const AttentionPaged& a);
Cost cost(const Exec& exec, const AttentionPaged& a);
size_t workspace(const Exec& exec, const AttentionPaged& a);

}  // namespace nrl::ops
