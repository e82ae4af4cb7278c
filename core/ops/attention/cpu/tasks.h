#pragma once
// Code shared by the forward and the backward pass: rows of heads, sequences, and the numbering of tasks.
// Compiled once per instruction set.

#include <cstdint>

#include "core/ops/attention/cpu/blocks.h"

namespace nrl::ops::NRL_ISA {

/// Rows of the heads of a (rows, heads, D) tensor; steps in elements.
template <class T>
struct HeadRows {
  T* data;
  int64_t row_step, head_step;
  explicit HeadRows(const Tensor& t)
      : data(static_cast<T*>(t.data)), row_step(t.step(0)), head_step(t.step(1)) {}
  T* at(int64_t row, int64_t head) const { return data + row * row_step + head * head_step; }
};

/// The scale of an FP8 tensor that has Scaling::tensor.
inline float tensor_scale(const Tensor& t) {
  return *static_cast<const float*>(t.scales.data);
}

/// Rows of one sequence.
struct Span {
  int64_t q0, queries, k0, keys, offset;
  Span(const Sequences& all, int64_t s)
      : q0(all.cu_q[s]),
        queries(all.cu_q[s + 1] - q0),
        k0(all.cu_k[s]),
        keys(all.cu_k[s + 1] - k0),
        offset(keys - queries) {}
};

/// Queries [row, row + count) of a sequence and the keys that they see.
struct QueryBlock {
  int64_t row, count;
  Range seen;
};

/// The block of at most `most` queries that begins at `row` and ends before `end`. The keys are a part of
/// `keys`, with whole key blocks at the front.
template <class Arguments>
QueryBlock query_block_at(const Arguments& a, const Span& span, int64_t row, int64_t end, const Range& keys,
                          int64_t most = query_block) {
  const int64_t count = std::min(most, end - row);
  const Mask mask{a.causal, a.window, row + span.offset};
  return {
      row,
      count,
      {std::max(keys.begin, mask.key_begin(0) / key_block * key_block), mask.key_end(count - 1, keys.end)}};
}

/// The key block of `q` that begins at `key`.
template <class Arguments>
Block key_block_at(const Arguments& a, const Span& span, const QueryBlock& q, int64_t key) {
  return {q.count, std::min(key_block, q.seen.end - key), {a.causal, a.window, q.row + span.offset - key}};
}

/// Sizes of a call and its tasks (plan.h), numbered with the key head fastest, then the sequence,
/// then the part.
struct Tasks {
  Sequences sequences;
  int64_t heads, kv_heads, group, d, padded, part_count;

  template <class Arguments>
  Tasks(const char* op, int threads, const Arguments& a)
      : sequences(op, a.cu_q, a.cu_k, a.q.dim(0), a.k.dim(0)),
        heads(a.q.dim(1)),
        kv_heads(a.k.dim(1)),
        group(heads / kv_heads),
        d(a.q.dim(2)),
        padded(round_up(d, lane_multiple)),
        part_count(parts(threads, sequences.count * kv_heads, sequences.longest)) {}

  int64_t count() const { return part_count * sequences.count * kv_heads; }
  int64_t kv_head_of(int64_t task) const { return task % kv_heads; }
  Span span_of(int64_t task) const { return {sequences, task / kv_heads % sequences.count}; }
  int64_t part_of(int64_t task) const { return task / kv_heads / sequences.count; }

  /// The query rows of a task of the forward pass. The last rows of causal attention cost most: they go
  /// first, so that no thread is left alone with them.
  Range part_queries(const Span& span, int64_t task) const {
    return slice(span.queries, part_count - 1 - part_of(task), query_block);
  }
  /// The keys of a part of the backward pass.
  Range part_keys(const Span& span, int64_t part) const { return slice(span.keys, part, key_block); }

 private:
  Range slice(int64_t n, int64_t part, int64_t block) const {
    const int64_t rows = round_up(ceil_div(n, part_count), block), begin = std::min(part * rows, n);
    return {begin, std::min(begin + rows, n)};
  }
};

}  // namespace nrl::ops::NRL_ISA
