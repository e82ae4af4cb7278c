#pragma once
// dq of attention's backward pass: written by the task of a block of queries, or summed in order over the
// parts of the keys, which leave their shares in f32. And the constants of its rows.

#include <cstring>
#include <limits>

#include "core/device/cpu/parallel.h"
#include "core/ops/attention/cpu/tasks.h"

namespace nrl::ops::NRL_ISA {

/// lse in units of log2 and delta = scale * rowsum(dout * out) of a block of queries from `row` on. `dout`:
/// its rows for `head`, `step` apart.
template <class G, class Out>
void row_constants(const AttentionBackward& a, int64_t row, int64_t count, int64_t head, const G* dout,
                   int64_t step, const HeadRows<const Out>& out, float scale, float* lse, float* delta) {
  const float* from = static_cast<const float*>(a.lse.data) + head * a.lse.step(0) + row;
  const int64_t d = a.q.dim(2);
  std::fill_n(lse, query_block, 0.0f);
  std::fill_n(delta, query_block, 0.0f);
  for (int64_t r = 0; r < count; ++r) {
    // A query that sees no key has lse = -infinity; its probabilities are masked and must only stay finite.
    lse[r] = from[r] == -std::numeric_limits<float>::infinity() ? -lowest : from[r] * log2_e;
    const Out* o = out.at(row + r, head);
    const G* g = dout + r * step;
    Vec sum{};
    int64_t c = 0;
    for (; c + lanes <= d; c += lanes) sum += load(g + c) * load(o + c);
    float rest = 0;
    for (; c < d; ++c) rest += static_cast<float>(g[c]) * static_cast<float>(o[c]);
    delta[r] = (sum_lanes(sum) + rest) * scale;
  }
}

template <class Out>
class QueryGradients {
 public:
  /// dq = factor * the sums.
  QueryGradients(const AttentionBackward& a, const Tasks& tasks, float factor, Scratch& scratch)
      : a_(a), tasks_(tasks), dq_(a.dq), factor_(factor) {
    if (tasks.part_count > 1)
      parts_ = scratch.floats(tasks.part_count * partial_dq(a.q.dim(0), tasks.heads, tasks.padded));
  }

  /// Writes dq of a block of queries, or this part's share of it, from rows `ld` apart with at least
  /// tasks.padded columns.
  void write(int64_t row, int64_t count, int64_t head, int64_t part, const float* rows, int64_t ld) const {
    if (tasks_.part_count == 1)
      return unpack_rows(count, tasks_.d, ld, rows, factor_, dq_.at(row, head), dq_.row_step);
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(share(part, row + r, head), rows + r * ld,
                  static_cast<size_t>(tasks_.padded) * sizeof(float));
  }

  /// For queries that see no keys of the part.
  void clear(int64_t row, int64_t count, int64_t head) const {
    if (tasks_.part_count == 1) clear_rows(row, count, head);
  }

  /// After all tasks: sums the shares.
  void add_parts(int threads) const {
    if (tasks_.part_count == 1) return;
    cpu::parallel_tasks(threads, tasks_.sequences.count * tasks_.heads, [this](int64_t item, int64_t) {
      add_parts_of(item / tasks_.heads, item % tasks_.heads);
    });
  }

  HeadRows<Out> rows() const { return dq_; }

 private:
  void clear_rows(int64_t row, int64_t count, int64_t head) const {
    for (int64_t r = 0; r < count; ++r) std::fill_n(dq_.at(row + r, head), tasks_.d, Out{});
  }

  float* share(int64_t part, int64_t row, int64_t head) const {
    return parts_ + ((part * a_.q.dim(0) + row) * tasks_.heads + head) * tasks_.padded;
  }

  /// dq of one sequence and head: the sum over the parts that its blocks saw, in order.
  void add_parts_of(int64_t sequence, int64_t head) const {
    const int64_t padded = tasks_.padded, step = tasks_.heads * padded;
    const Span span(tasks_.sequences, sequence);
    for (int64_t row = 0; row < span.queries; row += query_block) {
      int64_t count = 0;
      float* total = nullptr;
      for (int64_t part = 0; part < tasks_.part_count; ++part) {
        const QueryBlock q = query_block_at(a_, span, row, span.queries, tasks_.part_keys(span, part));
        count = q.count;
        if (q.seen.begin >= q.seen.end) continue;
        float* const addend = share(part, span.q0 + row, head);
        if (!total) {
          total = addend;
          continue;
        }
        for (int64_t r = 0; r < count; ++r)
          for (int64_t c = r * step; c < r * step + padded; c += lanes)
            micro::store(total + c, micro::load(total + c) + micro::load(addend + c));
      }
      if (!total) {
        clear_rows(span.q0 + row, count, head);
        continue;
      }
      for (int64_t r = 0; r < count; ++r)
        unpack_rows(1, tasks_.d, padded, total + r * step, factor_, dq_.at(span.q0 + row + r, head), 0);
    }
  }

  const AttentionBackward& a_;
  const Tasks& tasks_;
  HeadRows<Out> dq_;
  float factor_;
  float* parts_ = nullptr;  ///< (part, token, head, tasks.padded) when there are several parts
};

}  // namespace nrl::ops::NRL_ISA
