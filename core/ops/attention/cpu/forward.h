#pragma once
// Forward attention: for query i with the keys j that it sees
//
//   s_ij = scale q_i . k_j,  m_i = max_j s_ij,  l_i = sum_j exp(s_ij - m_i)
//   out_i = sum_j drop(exp(s_ij - m_i)) v_j / l_i,  lse_i = m_i + log(l_i)
//
// In FP8 the numbers of q, k and v are codes times a scale, which is applied to s and out, and exp(s_ij -
// m_i) is rounded to E4M3 for the sum over v_j (attention.h).
//
// Reads q, k, v; writes (=) out and, where wanted, lse. m and l are kept for the keys seen so far, and out is
// rescaled when m grows (online softmax). A task packs keys and values of its key head once and runs through
// its queries in blocks of 64, each for all query heads of the group.

#include <cstring>
#include <limits>
#include <type_traits>

#include "core/ops/attention/cpu/forward_tasks.h"

namespace nrl::ops::NRL_ISA {

/// T: of q, k and v, in FP8 or as Out.
template <class T, class Out>
class Forward : public ForwardTasks<Forward<T, Out>, ForwardBuffers, T, Out> {
  static constexpr bool fp8 = !std::is_same_v<T, Out>;
  using Base = ForwardTasks<Forward, ForwardBuffers, T, Out>;
  using Base::a_, Base::k_, Base::keep_, Base::out_, Base::q_, Base::tasks_, Base::v_;

 public:
  Forward(Exec& exec, const AttentionForward& a)
      : Base(exec, a, 2 * tiles_per_gemm),
        score_scale_(fp8 ? a.scale * tensor_scale(a.q) * tensor_scale(a.k) : a.scale),
        out_scale_(fp8 ? tensor_scale(a.v) / probability_code_scale : keep_.scale) {}

  struct Thread {};
  /// Scratch memory of a task.
  struct Buffers {
    float *k_rows, *v_rows;       ///< of the keys [packed.begin, packed.end)
    float *out_rows, *q_columns;  ///< of a block of queries
    float* scores;                ///< S^T of a block, then its probabilities
    float *row_max, *row_sum;     ///< m (in units of log2) and l of a block of queries
    Range packed{0, 0};

    Buffers(Scratch scratch, const ForwardBuffers& sizes)
        : k_rows(scratch.floats(sizes.packed)),
          v_rows(scratch.floats(sizes.packed)),
          out_rows(scratch.floats(sizes.rows)),
          q_columns(scratch.floats(sizes.columns)),
          scores(scratch.floats(sizes.scores)),
          row_max(scratch.floats(sizes.lanes)),
          row_sum(scratch.floats(sizes.lanes)) {}
  };

  /// Packs keys and values up to `end`, when a block first needs them.
  void pack_keys(const Span& span, int64_t kv_head, int64_t end, Buffers& b) const {
    if (b.packed.end >= end) return;
    const int64_t key = b.packed.end, count = end - key, at = (key - b.packed.begin) * tasks_.padded;
    pack_rows(count, tasks_.d, tasks_.padded, k_.at(span.k0 + key, kv_head), k_.row_step, b.k_rows + at);
    pack_rows(count, tasks_.d, tasks_.padded, v_.at(span.k0 + key, kv_head), v_.row_step, b.v_rows + at);
    b.packed.end = end;
  }

  /// out_rows, row_max and row_sum of a block of queries over all keys that it sees.
  void attend(const Span& span, const QueryBlock& q, int64_t head, const Buffers& b,
              Prefetcher& prefetcher) const {
    const int64_t d = tasks_.d, padded = tasks_.padded;
    pack_block<T>(q.count, d, padded, q_.at(span.q0 + q.row, head), q_.row_step, nullptr, b.q_columns);
    std::fill_n(b.row_max, query_block, lowest);
    std::fill_n(b.row_sum, query_block, 0.0f);
    bool accumulate = false;
    for (int64_t key = q.seen.begin; key < q.seen.end; key += key_block) {
      const Block block = key_block_at(a_, span, q, key);
      const int64_t at = (key - b.packed.begin) * padded;
      score_product(block, d, b.k_rows + at, padded, b.q_columns, b.scores, prefetcher);
      softmax(block, span.q0 + q.row, head, key, span.k0 + key, accumulate, b);
      by_query(block, padded, b.scores, b.v_rows + at, b.out_rows, accumulate, prefetcher);
      accumulate = true;
    }
    if (!accumulate) std::memset(b.out_rows, 0, static_cast<size_t>(q.count * padded) * sizeof(float));
  }

  /// Writes out and lse of queries [row, row + count). A query without keys gets 0 and minus infinity.
  void finish(int64_t row, int64_t count, int64_t head, const Buffers& b) const {
    if (a_.lse) {
      float* lse = static_cast<float*>(a_.lse.data) + head * a_.lse.step(0) + row;
      alignas(64) float logs[query_block];
      for (int64_t i = 0; i < count; i += lanes) {
        const Vec l = micro::load(b.row_sum + i);
        const Vec value = (micro::load(b.row_max + i) + micro::log2(l)) * ln_2;
        micro::store(logs + i,
                     micro::select(l == 0.0f, micro::splat(-std::numeric_limits<float>::infinity()), value));
      }
      std::memcpy(lse, logs, static_cast<size_t>(count) * sizeof(float));
    }
    for (int64_t r = 0; r < count; ++r)
      unpack_rows(1, tasks_.d, tasks_.padded, b.out_rows + r * tasks_.padded,
                  b.row_sum[r] == 0.0f ? 0.0f : out_scale_ / b.row_sum[r], out_.at(row + r, head), 0);
  }

 private:
  /// Scores of a block become probabilities; with `accumulate` the output so far is rescaled to
  /// the new maximum.
  void softmax(const Block& block, int64_t row, int64_t head, int64_t key, int64_t key_row, bool accumulate,
               const Buffers& b) const {
    const float factor = score_scale_ * log2_e;
    for (int64_t i = 0; i < block.queries; i += lanes) {
      const Vec rescale = block.full
                              ? softmax_step<false, fp8>(block, i, factor, b.scores, b.row_max, b.row_sum)
                              : softmax_step<true, fp8>(block, i, factor, b.scores, b.row_max, b.row_sum);
      if (accumulate)
        rescale_rows(std::min<int64_t>(lanes, block.queries - i), rescale, b.out_rows + i * tasks_.padded);
      if (keep_.drops())
        keep_.drop_block(row + i, head, key, key_row, block.keys_of(i, lanes), b.scores + i, query_block);
    }
  }

  void rescale_rows(int64_t count, Vec rescale, float* rows) const {
    alignas(64) float factors[lanes];
    micro::store(factors, rescale);
    for (int64_t r = 0; r < count; ++r, rows += tasks_.padded) {
      if (factors[r] == 1.0f) continue;
      for (int64_t c = 0; c < tasks_.padded; c += lanes)
        micro::store(rows + c, micro::load(rows + c) * factors[r]);
    }
  }

  float score_scale_, out_scale_;  ///< of the scores, and of the sums of probabilities times values
};

}  // namespace nrl::ops::NRL_ISA
