#pragma once
// Backward attention: with P_ij = exp(s_ij - lse_i), drop(.) the mask of the forward pass and its scale, and
// delta_i = dout_i . out_i
//
//   dv_j = sum_i drop(P_ij) dout_i,  dS_ij = P_ij (drop(dout_i . v_j) - delta_i)
//   dq_i = scale sum_j dS_ij k_j,    dk_j = scale sum_i dS_ij q_i
//
// In FP8 the numbers of q, k, v and dout are codes times a scale, P_ij is rounded to E4M3 for dv and dS_ij to
// E5M2 (attention.h).
//
// Reads dout, q, k, v, out, lse; writes (=) dq, dk, dv. A task owns the keys of its part: it sums their dk
// and dv over all queries of the group in ascending order. dq of a query needs all parts: with more than one,
// each leaves its share in f32 and add_parts() adds the shares in order.

#include <cstring>
#include <limits>
#include <type_traits>

#include "core/device/cpu/parallel.h"
#include "core/ops/attention/cpu/keep.h"
#include "core/ops/attention/cpu/tasks.h"

namespace nrl::ops::NRL_ISA {

/// T: of q, k and v, and G: of dout, both in FP8 or as Out.
template <class T, class G, class Out>
class Backward {
 public:
  Backward(Exec& exec, const AttentionBackward& a)
      : a_(a),
        tasks_("attention_backward", exec.threads, a),
        dout_(a.dout),
        q_(a.q),
        k_(a.k),
        v_(a.v),
        out_(a.out),
        dq_(a.dq),
        dk_(a.dk),
        dv_(a.dv),
        threads_(exec.threads),
        keep_(a),
        scales_(a, keep_.scale),
        sizes_(tasks_.padded, tasks_.sequences.longest) {
    Scratch scratch("attention_backward", exec.workspace);
    memory_ = scratch.bytes(static_cast<size_t>(exec.threads) * sizes_.bytes());
    if (tasks_.part_count > 1)
      dq_parts_ = scratch.floats(tasks_.part_count * partial_dq(a.q.dim(0), tasks_.heads, tasks_.padded));
  }

  void run() const {
    const int threads = static_cast<int>(threads_);
    cpu::parallel_tasks(threads, tasks_.count(),
                        [this](int64_t task, int64_t thread) { run_task(task, thread); });
    if (tasks_.part_count == 1) return;
    cpu::parallel_tasks(threads, tasks_.sequences.count * tasks_.heads, [this](int64_t item, int64_t) {
      add_parts(item / tasks_.heads, item % tasks_.heads);
    });
  }

 private:
  static constexpr bool fp8 = !std::is_same_v<T, Out>;

  /// Factors of the sums. In FP8 they are over products of codes, `delta` over codes of dout times out.
  struct SumScales {
    float score, dprobability, delta, ds_code, dq, dk, dv;
    SumScales(const AttentionBackward& a, float keep)
        : score(a.scale), dprobability(1), delta(1), ds_code(1), dq(a.scale), dk(a.scale), dv(keep) {
      if constexpr (fp8) {
        const float q = tensor_scale(a.q), k = tensor_scale(a.k), v = tensor_scale(a.v),
                    dout = tensor_scale(a.dout), ds = score_gradient_scale(a.scale, a.q.dim(2), dout, v);
        score = a.scale * q * k;
        dprobability = dout * v;
        delta = dout;
        ds_code = a.scale / ds;
        dq = ds * k;
        dk = ds * q;
        dv = dout / probability_code_scale;
      }
    }
  };

  /// Scratch memory of a task.
  struct Buffers {
    float *k_rows, *v_rows, *dk_rows, *dv_rows;  ///< of the keys [keys.begin, packed_end)
    float *q_rows, *dout_rows, *dq_rows;         ///< of a block of queries
    float *q_columns, *dout_columns;
    float *p, *ds;       ///< S^T and dP^T of a block, then P^T and dS^T
    float *lse, *delta;  ///< of a block of queries; lse in units of log2
    Range keys{0, 0};    ///< of the task
    int64_t packed_end = 0;

    Buffers(Scratch scratch, const BackwardBuffers& sizes, const Range& keys_)
        : k_rows(scratch.floats(sizes.packed)),
          v_rows(scratch.floats(sizes.packed)),
          dk_rows(scratch.floats(sizes.packed)),
          dv_rows(scratch.floats(sizes.packed)),
          q_rows(scratch.floats(sizes.rows)),
          dout_rows(scratch.floats(sizes.rows)),
          dq_rows(scratch.floats(sizes.rows)),
          q_columns(scratch.floats(sizes.columns)),
          dout_columns(scratch.floats(sizes.columns)),
          p(scratch.floats(sizes.scores)),
          ds(scratch.floats(sizes.scores)),
          lse(scratch.floats(sizes.lanes)),
          delta(scratch.floats(sizes.lanes)),
          keys(keys_),
          packed_end(keys_.begin) {}
  };

  void run_task(int64_t task, int64_t thread) const {
    const Span span = tasks_.span_of(task);
    const int64_t kv_head = tasks_.kv_head_of(task), part = tasks_.part_of(task);
    Buffers b(Scratch("attention_backward",
                      {memory_ + static_cast<size_t>(thread) * sizes_.bytes(), sizes_.bytes()}),
              sizes_, part_keys(span, part));
    for (int64_t row = 0; row < span.queries; row += query_block) {
      const QueryBlock q = query_block_at(a_, span, row, span.queries, b.keys);
      const bool sees_keys = q.seen.begin < q.seen.end;
      if (sees_keys) pack_keys(span, kv_head, q.seen.end, b);
      for (int64_t head = kv_head * tasks_.group; head < (kv_head + 1) * tasks_.group; ++head) {
        if (!sees_keys) {
          if (tasks_.part_count == 1) clear_dq(span.q0 + q.row, q.count, head);
          continue;
        }
        Prefetcher prefetcher = prefetch_behind(task, span, q, head, b);
        pack_queries(span, q, head, b);
        for (int64_t key = q.seen.begin; key < q.seen.end; key += key_block)
          add_block(span, q, head, key, b, prefetcher);
        write_dq(span.q0 + q.row, q.count, head, part, b);
      }
    }
    pack_keys(span, kv_head, b.keys.end, b);  // keys that no query saw have gradient zero
    write_dk_dv(span, kv_head, b);
  }

  Range part_keys(const Span& span, int64_t part) const {
    const int64_t rows = round_up(ceil_div(span.keys, tasks_.part_count), key_block);
    const int64_t begin = std::min(part * rows, span.keys);
    return {begin, std::min(begin + rows, span.keys)};
  }

  /// Packs keys and values up to `end` and clears their gradients, when a block first needs them.
  void pack_keys(const Span& span, int64_t kv_head, int64_t end, Buffers& b) const {
    if (b.packed_end >= end) return;
    const int64_t d = tasks_.d, padded = tasks_.padded, key = b.packed_end, count = end - key,
                  at = (key - b.keys.begin) * padded;
    pack_rows(count, d, padded, k_.at(span.k0 + key, kv_head), k_.row_step, b.k_rows + at);
    pack_rows(count, d, padded, v_.at(span.k0 + key, kv_head), v_.row_step, b.v_rows + at);
    const auto bytes = static_cast<size_t>(count * padded) * sizeof(float);
    std::memset(b.dk_rows + at, 0, bytes);
    std::memset(b.dv_rows + at, 0, bytes);
    b.packed_end = end;
  }

  /// Prefetches the rows used after the block `q` of `head`: the next head, the next block of queries, or the
  /// gradients of the task's keys and the first rows of the thread's likely next task. With one part it also
  /// prefetches dq of the block.
  Prefetcher prefetch_behind(int64_t task, const Span& span, const QueryBlock& q, int64_t head,
                             const Buffers& b) const {
    Prefetcher prefetcher(tasks_.d * static_cast<int64_t>(sizeof(T)));
    const int64_t kv_head = tasks_.kv_head_of(task), first_head = kv_head * tasks_.group;
    const bool last_head = head + 1 == first_head + tasks_.group;
    const int64_t next = last_head ? q.row + query_block : q.row,
                  next_head = last_head ? first_head : head + 1;
    if (next < span.queries) {
      const QueryBlock after = query_block_at(a_, span, next, span.queries, b.keys);
      prefetch_queries(span.q0 + next, after.count, next_head, prefetcher);
      prefetcher.add(k_.at(span.k0 + b.packed_end, kv_head), k_.row_step, after.seen.end - b.packed_end);
      prefetcher.add(v_.at(span.k0 + b.packed_end, kv_head), v_.row_step, after.seen.end - b.packed_end);
    } else {
      const int64_t length = b.keys.end - b.keys.begin;
      prefetch_task(task + threads_, prefetcher);
      prefetcher.add(dk_.at(span.k0 + b.keys.begin, kv_head), dk_.row_step, length);
      prefetcher.add(dv_.at(span.k0 + b.keys.begin, kv_head), dv_.row_step, length);
    }
    if (tasks_.part_count == 1) prefetcher.add(dq_.at(span.q0 + q.row, head), dq_.row_step, q.count);
    prefetcher.spread(5 * tiles_per_gemm * ceil_div(q.seen.end - q.seen.begin, key_block));
    return prefetcher;
  }

  void prefetch_queries(int64_t row, int64_t count, int64_t head, Prefetcher& prefetcher) const {
    prefetcher.add(q_.at(row, head), q_.row_step, count);
    prefetcher.add(dout_.at(row, head), dout_.row_step, count);
    prefetcher.add(out_.at(row, head), out_.row_step, count);
  }

  void prefetch_task(int64_t task, Prefetcher& prefetcher) const {
    if (task >= tasks_.count()) return;
    const int64_t kv_head = tasks_.kv_head_of(task);
    const Span span = tasks_.span_of(task);
    prefetch_queries(span.q0, std::min(query_block, span.queries), kv_head * tasks_.group, prefetcher);
    prefetcher.add(k_.at(span.k0, kv_head), k_.row_step, std::min(key_block, span.keys));
    prefetcher.add(v_.at(span.k0, kv_head), v_.row_step, std::min(key_block, span.keys));
  }

  void pack_queries(const Span& span, const QueryBlock& q, int64_t head, const Buffers& b) const {
    const int64_t row = span.q0 + q.row, d = tasks_.d, padded = tasks_.padded;
    pack_block(q.count, d, padded, q_.at(row, head), q_.row_step, b.q_rows, b.q_columns);
    pack_block(q.count, d, padded, dout_.at(row, head), dout_.row_step, b.dout_rows, b.dout_columns);
    row_constants(row, q.count, head, b.dout_rows, b.lse, b.delta);
  }

  /// Accumulates the contributions of query block `q` and the key block from `key` on into dq_rows, dk_rows
  /// and dv_rows.
  void add_block(const Span& span, const QueryBlock& q, int64_t head, int64_t key, const Buffers& b,
                 Prefetcher& prefetcher) const {
    const Block block = key_block_at(a_, span, q, key);
    const int64_t d = tasks_.d, padded = tasks_.padded, at = (key - b.keys.begin) * padded;
    score_product(block, d, b.k_rows + at, padded, b.q_columns, b.p, prefetcher);
    score_product(block, d, b.v_rows + at, padded, b.dout_columns, b.ds, prefetcher);
    const Place place{span.q0 + q.row, head, key, span.k0 + key};
    for (int64_t i = 0; i < block.queries; i += lanes) {
      if (keep_.drops())
        block.full ? gradient_step<false, true>(block, i, place, b.p, b.ds, b.lse, b.delta)
                   : gradient_step<true, true>(block, i, place, b.p, b.ds, b.lse, b.delta);
      else
        block.full ? gradient_step<false, false>(block, i, place, b.p, b.ds, b.lse, b.delta)
                   : gradient_step<true, false>(block, i, place, b.p, b.ds, b.lse, b.delta);
    }
    by_key(block, padded, b.p, b.dout_rows, b.dv_rows + at, prefetcher);
    by_key(block, padded, b.ds, b.q_rows, b.dk_rows + at, prefetcher);
    by_query(block, padded, b.ds, b.k_rows + at, b.dq_rows, key > q.seen.begin, prefetcher);
  }

  /// Where a block lies: its first query among all, the query head, its first key in the sequence and among
  /// all.
  struct Place {
    int64_t row, head, key, key_row;
  };

  /// Computes P = exp(S - lse) and dS = P (drop(dP) - delta), then drop(P). p holds S^T and ds holds dP^T on
  /// entry. The score scale of dS (except in FP8) and the dropout scale of P are applied at the end.
  template <bool masked, bool dropped>
  void gradient_step(const Block& b, int64_t i, [[maybe_unused]] const Place& place, float* p, float* ds,
                     const float* lse, const float* delta) const {
    const float factor = scales_.score * log2_e;
    const Vec l = micro::load(lse + i), shift = micro::load(delta + i);
    Range keys{0, b.keys};
    [[maybe_unused]] const LaneMask visible(b, i);
    if constexpr (masked) keys = visible.keys;
    const auto step = [&](int64_t j, [[maybe_unused]] micro::IntVec keep) __attribute__((always_inline)) {
      float* p_at = p + j * query_block + i;
      float* ds_at = ds + j * query_block + i;
      Vec x = micro::exp2(micro::load(p_at) * factor - l), dp = micro::load(ds_at);
      if constexpr (fp8) dp = dp * scales_.dprobability;
      if constexpr (dropped) dp = micro::select(keep, dp * keep_.scale, Vec{});
      Vec y = x * (dp - shift);
      if constexpr (masked) {
        const micro::IntVec seen = visible(j);
        x = micro::select(seen, x, Vec{});
        y = micro::select(seen, y, Vec{});
      }
      if constexpr (dropped) x = micro::select(keep, x, Vec{});
      micro::store(p_at, fp8 ? probability_code(x) : x);
      micro::store(ds_at, fp8 ? rounded_to<DType::e5m2>(y * scales_.ds_code) : y);
    };
    if constexpr (dropped) {
      keep_.for_keys(place.row + i, place.head, place.key, place.key_row, keys, step);
    } else {
#pragma GCC unroll 4
      for (int64_t j = keys.begin; j < keys.end; ++j) step(j, micro::IntVec{});
    }
    if constexpr (masked) {
      clear_margins(b, keys, p + i);
      clear_margins(b, keys, ds + i);
    }
  }

  /// lse in units of log2 and delta = rowsum(dout * out) of a block of queries.
  void row_constants(int64_t row, int64_t count, int64_t head, const float* dout_rows, float* lse,
                     float* delta) const {
    const float* from = static_cast<const float*>(a_.lse.data) + head * a_.lse.step(0) + row;
    std::fill_n(lse, query_block, 0.0f);
    std::fill_n(delta, query_block, 0.0f);
    for (int64_t r = 0; r < count; ++r) {
      // A query that sees no key has lse = -infinity; its probabilities are masked and must only stay finite.
      lse[r] = from[r] == -std::numeric_limits<float>::infinity() ? -lowest : from[r] * log2_e;
      const Out* o = out_.at(row + r, head);
      const float* g = dout_rows + r * tasks_.padded;
      Vec sum{};
      int64_t c = 0;
      for (; c + lanes <= tasks_.d; c += lanes) sum += micro::load(g + c) * load(o + c);
      float rest = 0;
      for (; c < tasks_.d; ++c) rest += g[c] * static_cast<float>(o[c]);
      delta[r] = (sum_lanes(sum) + rest) * scales_.delta;
    }
  }

  /// dq of a block of queries, or this part's share of it.
  void write_dq(int64_t row, int64_t count, int64_t head, int64_t part, const Buffers& b) const {
    const int64_t padded = tasks_.padded;
    if (tasks_.part_count == 1)
      return unpack_rows(count, tasks_.d, padded, b.dq_rows, scales_.dq, dq_.at(row, head), dq_.row_step);
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(dq_part(part, row + r, head), b.dq_rows + r * padded,
                  static_cast<size_t>(padded) * sizeof(float));
  }

  void write_dk_dv(const Span& span, int64_t kv_head, const Buffers& b) const {
    const int64_t row = span.k0 + b.keys.begin, count = b.keys.end - b.keys.begin;
    unpack_rows(count, tasks_.d, tasks_.padded, b.dk_rows, scales_.dk, dk_.at(row, kv_head), dk_.row_step);
    unpack_rows(count, tasks_.d, tasks_.padded, b.dv_rows, scales_.dv, dv_.at(row, kv_head), dv_.row_step);
  }

  void clear_dq(int64_t row, int64_t count, int64_t head) const {
    for (int64_t r = 0; r < count; ++r) std::fill_n(dq_.at(row + r, head), tasks_.d, Out{});
  }

  float* dq_part(int64_t part, int64_t row, int64_t head) const {
    return dq_parts_ + ((part * a_.q.dim(0) + row) * tasks_.heads + head) * tasks_.padded;
  }

  /// dq of one sequence and head: the sum over the parts that its blocks saw, in order.
  void add_parts(int64_t sequence, int64_t head) const {
    const int64_t padded = tasks_.padded, step = tasks_.heads * padded;
    const Span span(tasks_.sequences, sequence);
    for (int64_t row = 0; row < span.queries; row += query_block) {
      int64_t count = 0;
      float* total = nullptr;
      for (int64_t part = 0; part < tasks_.part_count; ++part) {
        const QueryBlock q = query_block_at(a_, span, row, span.queries, part_keys(span, part));
        count = q.count;
        if (q.seen.begin >= q.seen.end) continue;
        float* const share = dq_part(part, span.q0 + row, head);
        if (!total) {
          total = share;
          continue;
        }
        for (int64_t r = 0; r < count; ++r)
          for (int64_t c = r * step; c < r * step + padded; c += lanes)
            micro::store(total + c, micro::load(total + c) + micro::load(share + c));
      }
      if (!total) {
        clear_dq(span.q0 + row, count, head);
        continue;
      }
      for (int64_t r = 0; r < count; ++r)
        unpack_rows(1, tasks_.d, padded, total + r * step, scales_.dq, dq_.at(span.q0 + row + r, head), 0);
    }
  }

  const AttentionBackward& a_;
  Tasks tasks_;
  HeadRows<const G> dout_;
  HeadRows<const T> q_, k_, v_;
  HeadRows<const Out> out_;
  HeadRows<Out> dq_, dk_, dv_;
  int64_t threads_;
  KeepMask keep_;
  SumScales scales_;
  BackwardBuffers sizes_;
  std::byte* memory_;          ///< Buffers of each thread
  float* dq_parts_ = nullptr;  ///< (part, token, head, padded) when there are several parts
};

}  // namespace nrl::ops::NRL_ISA
