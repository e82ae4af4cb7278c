#pragma once
// Forward attention (forward.h) where bf16 is multiplied as bf16: exp(s_ij - m_i) is rounded to bf16 for the
// sum over v_j, but not for l_i.
//
// Blocks of scores are [query][key]: Q and P are read along rows, K and V are packed in words once per task.

#include "core/ops/attention/cpu/bf16_blocks.h"
#include "core/ops/attention/cpu/forward_tasks.h"

namespace nrl::ops::NRL_ISA {

class Bf16Forward : public ForwardTasks<Bf16Forward, Bf16ForwardBuffers, bf16, bf16> {
 public:
  Bf16Forward(Exec& exec, const AttentionForward& a) : ForwardTasks(exec, a, vectors) {}

  using Thread = Bf16Product::Thread;
  struct Buffers {
    float *k_words, *v_pairs;  ///< of the keys [packed.begin, packed.end), by blocks
    float *q_rows, *out_rows;  ///< of a block of queries
    float *scores, *p_rows;    ///< of a block
    float* row_max;            ///< m in units of log2
    float* rescale;            ///< exp(old m - m)
    float* row_sums;           ///< l in 16 parts
    KeepBits keep;
    Range packed{0, 0};

    Buffers(Scratch scratch, const Bf16ForwardBuffers& sizes)
        : k_words(scratch.floats(sizes.key_words)),
          v_pairs(scratch.floats(sizes.key_words)),
          q_rows(scratch.floats(sizes.strip_rows / 2)),
          out_rows(scratch.floats(sizes.rows)),
          scores(scratch.floats(sizes.strip)),
          p_rows(scratch.floats(sizes.strip / 2)),
          row_max(scratch.floats(query_block)),
          rescale(scratch.floats(query_block)),
          row_sums(scratch.floats(query_block * lanes)),
          keep(scratch.bytes(sizes.keep_bytes)) {}
  };

  /// Packs the blocks of keys and values up to `end`, when a block of queries first needs them.
  void pack_keys(const Span& span, int64_t kv_head, int64_t end, Buffers& b) const {
    for (int64_t& key = b.packed.end; key < end; key += key_block) {
      const int64_t at = (key - b.packed.begin) * sizes_.padded / 2,
                    count = std::min(key_block, span.keys - key);
      pack_along_transposed({k_.at(span.k0 + key, kv_head), k_.row_step, count, tasks_.d}, sizes_.padded / 2,
                            b.k_words + at);
      pack_across({v_.at(span.k0 + key, kv_head), v_.row_step, count, tasks_.d}, sizes_.padded,
                  b.v_pairs + at);
    }
  }

  /// out_rows, row_max and row_sums of a block of queries over all keys that it sees, a strip at a time.
  void attend(const Span& span, const QueryBlock& q, int64_t head, Buffers& b, Prefetcher& prefetcher) const {
    std::fill_n(b.row_max, query_block, lowest);
    std::fill_n(b.row_sums, query_block * lanes, 0.0f);
    for (int64_t first = 0; first < q.count; first += strip_queries)
      attend_strip(span,
                   query_block_at(a_, span, q.row + first, q.row + q.count, {0, span.keys}, strip_queries),
                   first, head, b, prefetcher);
  }

  /// Writes out and lse of queries [row, row + count). A query without keys gets 0 and minus infinity.
  void finish(int64_t row, int64_t count, int64_t head, const Buffers& b) const {
    alignas(64) float sums[query_block], logs[query_block];
    for (int64_t i = 0; i < count; i += lanes) {
      Lanes parts[lanes];
#pragma GCC unroll 16
      for (int64_t r = 0; r < lanes; ++r) parts[r] = micro::load(b.row_sums + (i + r) * lanes);
      const Lanes l = reduce_rows(parts, [](Lanes x, Lanes y) { return x + y; });
      const Lanes value = (micro::load(b.row_max + i) + micro::log2(l)) * ln_2;
      micro::store(sums + i, l);
      micro::store(logs + i,
                   micro::select(l == 0.0f, micro::splat(-std::numeric_limits<float>::infinity()), value));
    }
    if (a_.lse) std::copy_n(logs, count, static_cast<float*>(a_.lse.data) + head * a_.lse.step(0) + row);
    for (int64_t r = 0; r < count; ++r)
      unpack_rows(1, tasks_.d, sizes_.padded, b.out_rows + r * sizes_.padded,
                  sums[r] == 0.0f ? 0.0f : keep_.scale / sums[r], out_.at(row + r, head), 0);
  }

 private:
  /// The strip `q` of queries, from `first` of its block on.
  void attend_strip(const Span& span, const QueryBlock& q, int64_t first, int64_t head, Buffers& b,
                    Prefetcher& prefetcher) const {
    const int64_t padded = sizes_.padded, words = padded / 2;
    float* const out_rows = b.out_rows + first * padded;
    pack_along({q_.at(span.q0 + q.row, head), q_.row_step, q.count, tasks_.d}, round_up(q.count, lanes),
               words, b.q_rows);
    bool accumulate = false;
    for (int64_t key = q.seen.begin; key < q.seen.end; key += key_block) {
      const Block block = key_block_at(a_, span, q, key);
      const int64_t at = (key - b.packed.begin) * words;
      score_product(block, words, b.q_rows, b.k_words + at, b.scores);
      if (keep_.drops()) b.keep.draw(keep_, block, span.q0 + q.row, head, key, span.k0 + key);
      const VisibleKeys visible{block};
      for (int64_t i = 0; i < q.count; i += lanes) {
        prefetcher.step();
        if (keep_.drops())
          softmax<true, true>(visible, first, i, b);
        else if (visible.all(i))
          softmax<false, false>(visible, first, i, b);
        else
          softmax<true, false>(visible, first, i, b);
        if (accumulate) rescale_rows(first + i, b);
      }
      by_query(block, padded, b.p_rows, b.v_pairs + at, out_rows, accumulate);
      accumulate = true;
    }
    if (!accumulate) std::fill_n(out_rows, q.count * padded, 0.0f);
  }

  /// One step of the online softmax for queries [i, i + 16) of the strip from `first` on: probabilities exp(s
  /// - m) with the new row maxima m.
  template <bool masked, bool dropped>
  void softmax(const VisibleKeys& visible, int64_t first, int64_t i, Buffers& b) const {
    const float factor = a_.scale * log2_e;
    float *const row_max = b.row_max + first, *const rescale = b.rescale + first,
                 *const row_sums = b.row_sums + first * lanes;
    const float* const s = b.scores + i * key_block;
    Range seen{0, vectors};
    if constexpr (masked) seen = visible.vectors_of(i);
    const auto score = [&](int64_t r, int64_t v, KeyBits bits) __attribute__((always_inline)) {
      const Lanes x = micro::load(s + r * key_block + v * lanes) * factor;
      return masked ? _mm512_mask_mov_ps(micro::splat(lowest), bits_of_vector(bits, v), x) : x;
    };
    Lanes m[lanes];
#pragma GCC unroll 16
    for (int64_t r = 0; r < lanes; ++r) {
      const KeyBits bits = masked ? visible.of(i + r) : 0;
      m[r] = micro::splat(lowest);
      if constexpr (masked)
        for (int64_t v = seen.begin; v < seen.end; ++v) m[r] = max(m[r], score(r, v, bits));
      else
        m[r] = max(max(score(r, 0, bits), score(r, 1, bits)), max(score(r, 2, bits), score(r, 3, bits)));
    }
    const Lanes old_max = micro::load(row_max + i);
    const Lanes new_max = max(old_max, reduce_rows(m, [](Lanes x, Lanes y) { return max(x, y); }));
    micro::store(row_max + i, new_max);
    micro::store(rescale + i, exp2_rounded(old_max - new_max));
    for (int64_t r = 0; r < lanes; ++r) {
      const Lanes shift = micro::splat(row_max[i + r]);
      const KeyBits bits = masked ? visible.of(i + r) : 0;
      Lanes sum = micro::load(row_sums + (i + r) * lanes) * rescale[i + r];
      Lanes p[vectors] = {};
      const auto probability = [&](int64_t v) __attribute__((always_inline)) {
        p[v] = exp2_rounded(micro::load(s + r * key_block + v * lanes) * factor - shift);
        if constexpr (masked) p[v] = _mm512_maskz_mov_ps(bits_of_vector(bits, v), p[v]);
        sum += p[v];
        if constexpr (dropped) p[v] = _mm512_maskz_mov_ps(b.keep.of(i + r, v), p[v]);
      };
#pragma GCC unroll 4
      for (int64_t v = 0; v < vectors; ++v)
        if (!masked || (v >= seen.begin && v < seen.end)) probability(v);
      micro::store(row_sums + (i + r) * lanes, sum);
      float* const to = b.p_rows + (i + r) * block_words;
      _mm512_store_si512(to, in_bf16(p[0], p[1]));
      _mm512_store_si512(to + lanes, in_bf16(p[2], p[3]));
    }
  }

  void rescale_rows(int64_t i, const Buffers& b) const {
    for (int64_t r = i; r < i + lanes; ++r) {
      if (b.rescale[r] == 1.0f) continue;
      float* const row = b.out_rows + r * sizes_.padded;
      for (int64_t c = 0; c < sizes_.padded; c += lanes)
        micro::store(row + c, micro::load(row + c) * b.rescale[r]);
    }
  }
};

}  // namespace nrl::ops::NRL_ISA
