#pragma once
// The walk of attention's forward pass over the blocks of a task, with its prefetches. Compiled once per
// instruction set.

#include <algorithm>

#include "core/device/cpu/parallel.h"
#include "core/ops/attention/cpu/keep.h"
#include "core/ops/attention/cpu/tasks.h"

namespace nrl::ops::NRL_ISA {

/// T: of q, k and v. `Sizes`: of Pass::Buffers (plan.h). `Pass` has
///   Buffers                               scratch memory of a task; Range packed: the keys in it
///   Thread                                exists on a thread during a task
///   pack_keys(span, kv_head, end, b)      packs keys and values up to `end`, if they are not packed yet
///   attend(span, q, head, b, prefetcher)  a block of queries over all keys that it sees
///   finish(row, count, head, b)           writes its out and lse
template <class Pass, class Sizes, class T, class Out>
class ForwardTasks {
 public:
  void run() const {
    cpu::parallel_tasks(threads_, tasks_.count(),
                        [this](int64_t task, int64_t thread) { run_task(task, thread); });
  }

 protected:
  ForwardTasks(Exec& exec, const AttentionForward& a, int64_t steps_per_block)
      : a_(a),
        tasks_("attention_forward", exec.threads, a),
        q_(a.q),
        k_(a.k),
        v_(a.v),
        out_(a.out),
        threads_(exec.threads),
        keep_(a),
        sizes_(tasks_.d, tasks_.sequences.longest),
        memory_(Scratch("attention_forward", exec.workspace)
                    .bytes(static_cast<size_t>(exec.threads) * sizes_.bytes())),
        steps_per_block_(steps_per_block) {}

  const AttentionForward& a_;
  Tasks tasks_;
  HeadRows<const T> q_, k_, v_;
  HeadRows<Out> out_;
  int threads_;
  KeepMask keep_;
  Sizes sizes_;

 private:
  void run_task(int64_t task, int64_t thread) const {
    const auto& pass = static_cast<const Pass&>(*this);
    const Span span = tasks_.span_of(task);
    const Range rows = tasks_.part_queries(span, task);
    if (rows.begin == rows.end) return;
    const int64_t kv_head = tasks_.kv_head_of(task);
    [[maybe_unused]] const typename Pass::Thread computes;
    typename Pass::Buffers b(
        Scratch("attention_forward",
                {memory_ + static_cast<size_t>(thread) * sizes_.bytes(), sizes_.bytes()}),
        sizes_);
    for (int64_t row = rows.begin; row < rows.end; row += query_block) {
      const QueryBlock q = query_block_at(a_, span, row, rows.end, {0, span.keys});
      if (row == rows.begin) b.packed = {q.seen.begin, q.seen.begin};
      pass.pack_keys(span, kv_head, q.seen.end, b);
      for (int64_t head = kv_head * tasks_.group; head < (kv_head + 1) * tasks_.group; ++head) {
        Prefetcher prefetcher = prefetch_behind(task, span, rows, q, head, b.packed.end);
        pass.attend(span, q, head, b, prefetcher);
        pass.finish(span.q0 + q.row, q.count, head, b);
      }
    }
  }

  /// Prefetches the output of the block `q` of `head` and the rows used after it: the next head, the next
  /// block of queries, or the first rows of the thread's likely next task.
  Prefetcher prefetch_behind(int64_t task, const Span& span, const Range& rows, const QueryBlock& q,
                             int64_t head, int64_t packed_end) const {
    Prefetcher prefetcher(tasks_.d * static_cast<int64_t>(sizeof(T)));
    const int64_t kv_head = tasks_.kv_head_of(task), next = q.row + query_block;
    if (head + 1 < (kv_head + 1) * tasks_.group) {
      prefetcher.add(q_.at(span.q0 + q.row, head + 1), q_.row_step, q.count);
    } else if (next < rows.end) {
      const QueryBlock after = query_block_at(a_, span, next, rows.end, {0, span.keys});
      prefetcher.add(q_.at(span.q0 + next, kv_head * tasks_.group), q_.row_step, after.count);
      prefetcher.add(k_.at(span.k0 + packed_end, kv_head), k_.row_step, after.seen.end - packed_end);
      prefetcher.add(v_.at(span.k0 + packed_end, kv_head), v_.row_step, after.seen.end - packed_end);
    } else {
      prefetch_task(task + threads_, prefetcher);
    }
    prefetcher.add(out_.at(span.q0 + q.row, head), out_.row_step, q.count);
    prefetcher.spread(steps_per_block_ * ceil_div(q.seen.end - q.seen.begin, key_block));
    return prefetcher;
  }

  void prefetch_task(int64_t task, Prefetcher& prefetcher) const {
    if (task >= tasks_.count()) return;
    const int64_t kv_head = tasks_.kv_head_of(task);
    const Span span = tasks_.span_of(task);
    prefetcher.add(q_.at(span.q0, kv_head * tasks_.group), q_.row_step, std::min(query_block, span.queries));
    prefetcher.add(k_.at(span.k0, kv_head), k_.row_step, std::min(key_block, span.keys));
    prefetcher.add(v_.at(span.k0, kv_head), v_.row_step, std::min(key_block, span.keys));
  }

  std::byte* memory_;        ///< Buffers of each thread
  int64_t steps_per_block_;  ///< calls of Prefetcher::step() for a block of keys, at least
};

}  // namespace nrl::ops::NRL_ISA
