#pragma once
// The walk of attention's backward pass over the blocks of a task, with its prefetches. Compiled once per
// instruction set.

#include <algorithm>

#include "core/device/cpu/parallel.h"
#include "core/ops/attention/cpu/keep.h"
#include "core/ops/attention/cpu/query_gradients.h"
#include "core/ops/attention/cpu/tasks.h"

namespace nrl::ops::NRL_ISA {

/// T: of q, k and v, and G: of dout. `Sizes`: of Pass::Buffers (plan.h). `Pass` has
///   Buffers                           scratch memory of a task: `keys` of the task, of which those before
///                                     `packed_end` are packed; `dq_rows` of a block of queries
///   Thread                            exists on a thread during a task
///   pack_keys(span, kv_head, end, b)  packs keys and values up to `end`, if they are not packed yet, and
///   clears
///                                     their gradients
///   pack_queries(span, q, head, b)    a block of queries, with its lse and delta
///   add_block(span, q, head, key, b, prefetcher)
///                                     adds the contributions of the block of queries and of a block of keys
///   write_dk_dv(span, kv_head, b)
template <class Pass, class Sizes, class T, class G, class Out>
class BackwardTasks {
 public:
  void run() const {
    cpu::parallel_tasks(threads_, tasks_.count(),
                        [this](int64_t task, int64_t thread) { run_task(task, thread); });
    dq_.add_parts(threads_);
  }

 protected:
  /// dq = dq_factor * the sums in dq_rows.
  BackwardTasks(Exec& exec, const AttentionBackward& a, float dq_factor, int64_t steps_per_block)
      : a_(a),
        tasks_("attention_backward", exec.threads, a),
        dout_(a.dout),
        q_(a.q),
        k_(a.k),
        v_(a.v),
        out_(a.out),
        dk_(a.dk),
        dv_(a.dv),
        threads_(exec.threads),
        keep_(a),
        sizes_(tasks_.d, tasks_.sequences.longest),
        steps_per_block_(steps_per_block),
        scratch_("attention_backward", exec.workspace),
        memory_(scratch_.bytes(static_cast<size_t>(exec.threads) * sizes_.bytes())),
        dq_(a, tasks_, dq_factor, scratch_) {}

  const AttentionBackward& a_;
  Tasks tasks_;
  HeadRows<const G> dout_;
  HeadRows<const T> q_, k_, v_;
  HeadRows<const Out> out_;
  HeadRows<Out> dk_, dv_;
  int threads_;
  KeepMask keep_;
  Sizes sizes_;

 private:
  void run_task(int64_t task, int64_t thread) const {
    const auto& pass = static_cast<const Pass&>(*this);
    const Span span = tasks_.span_of(task);
    const int64_t kv_head = tasks_.kv_head_of(task), part = tasks_.part_of(task);
    [[maybe_unused]] const typename Pass::Thread computes;
    typename Pass::Buffers b(
        Scratch("attention_backward",
                {memory_ + static_cast<size_t>(thread) * sizes_.bytes(), sizes_.bytes()}),
        sizes_, tasks_.part_keys(span, part));
    for (int64_t row = 0; row < span.queries; row += query_block) {
      const QueryBlock q = query_block_at(a_, span, row, span.queries, b.keys);
      const bool sees_keys = q.seen.begin < q.seen.end;
      if (sees_keys) pass.pack_keys(span, kv_head, q.seen.end, b);
      for (int64_t head = kv_head * tasks_.group; head < (kv_head + 1) * tasks_.group; ++head) {
        if (!sees_keys) {
          dq_.clear(span.q0 + q.row, q.count, head);
          continue;
        }
        Prefetcher prefetcher = prefetch_behind(task, span, q, head, b.keys, b.packed_end);
        pass.pack_queries(span, q, head, b);
        for (int64_t key = q.seen.begin; key < q.seen.end; key += key_block)
          pass.add_block(span, q, head, key, b, prefetcher);
        dq_.write(span.q0 + q.row, q.count, head, part, b.dq_rows, sizes_.padded);
      }
    }
    pass.pack_keys(span, kv_head, b.keys.end, b);  // keys that no query saw have gradient zero
    pass.write_dk_dv(span, kv_head, b);
  }

  /// Prefetches the rows used after the block `q` of `head`: the next head, the next block of queries, or the
  /// gradients of the task's keys and the first rows of the thread's likely next task. With one part it also
  /// prefetches dq of the block.
  Prefetcher prefetch_behind(int64_t task, const Span& span, const QueryBlock& q, int64_t head,
                             const Range& keys, int64_t packed_end) const {
    Prefetcher prefetcher(tasks_.d * static_cast<int64_t>(sizeof(T)));
    const int64_t kv_head = tasks_.kv_head_of(task), first_head = kv_head * tasks_.group;
    const bool last_head = head + 1 == first_head + tasks_.group;
    const int64_t next = last_head ? q.row + query_block : q.row,
                  next_head = last_head ? first_head : head + 1;
    if (next < span.queries) {
      const QueryBlock after = query_block_at(a_, span, next, span.queries, keys);
      prefetch_queries(span.q0 + next, after.count, next_head, prefetcher);
      prefetcher.add(k_.at(span.k0 + packed_end, kv_head), k_.row_step, after.seen.end - packed_end);
      prefetcher.add(v_.at(span.k0 + packed_end, kv_head), v_.row_step, after.seen.end - packed_end);
    } else {
      const int64_t length = keys.end - keys.begin;
      prefetch_task(task + threads_, prefetcher);
      prefetcher.add(dk_.at(span.k0 + keys.begin, kv_head), dk_.row_step, length);
      prefetcher.add(dv_.at(span.k0 + keys.begin, kv_head), dv_.row_step, length);
    }
    if (tasks_.part_count == 1)
      prefetcher.add(dq_.rows().at(span.q0 + q.row, head), dq_.rows().row_step, q.count);
    prefetcher.spread(steps_per_block_ * ceil_div(q.seen.end - q.seen.begin, key_block));
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

  int64_t steps_per_block_;  ///< calls of Prefetcher::step() for a block of keys, at least
  Scratch scratch_;
  std::byte* memory_;  ///< Pass::Buffers of each thread
  QueryGradients<Out> dq_;
};

}  // namespace nrl::ops::NRL_ISA
