#pragma once
// Backward attention (backward.h) where bf16 is multiplied as bf16: P_ij is rounded to bf16 for dv, dS_ij for
// dq and dk.
//
// Blocks of P and dS are [query][key]. dk and dv are summed transposed, so that P and dS are the operand
// which is packed by pairs of queries. A task owns the keys of its part, as in backward.h.

#include <cstring>

#include "core/ops/attention/cpu/backward_tasks.h"
#include "core/ops/attention/cpu/bf16_blocks.h"

namespace nrl::ops::NRL_ISA {

class Bf16Backward : public BackwardTasks<Bf16Backward, Bf16BackwardBuffers, bf16, bf16, bf16> {
 public:
  Bf16Backward(Exec& exec, const AttentionBackward& a) : BackwardTasks(exec, a, a.scale, vectors) {}

  using Thread = Bf16Product::Thread;
  struct Buffers {
    float *k_words, *v_words, *k_pairs;  ///< of the keys [keys.begin, packed_end), by blocks
    float *dk, *dv;                      ///< the same, [column][key]
    float *q_rows, *dout_rows, *q_columns, *dout_columns, *dq_rows;  ///< of a block of queries
    float *s, *dp;  ///< of a strip of queries with a block of keys
    float* ds_rows;
    float *p_pairs, *ds_pairs;  ///< of a block
    float *lse, *delta;         ///< of a block of queries; lse in units of log2
    KeepBits keep;
    Range keys{0, 0};  ///< of the task
    int64_t packed_end = 0;

    Buffers(Scratch scratch, const Bf16BackwardBuffers& sizes, const Range& keys_)
        : k_words(scratch.floats(sizes.key_words)),
          v_words(scratch.floats(sizes.key_words)),
          k_pairs(scratch.floats(sizes.key_words)),
          dk(scratch.floats(2 * sizes.key_words)),
          dv(scratch.floats(2 * sizes.key_words)),
          q_rows(scratch.floats(sizes.rows / 2)),
          dout_rows(scratch.floats(sizes.rows / 2)),
          q_columns(scratch.floats(sizes.rows / 2)),
          dout_columns(scratch.floats(sizes.rows / 2)),
          dq_rows(scratch.floats(sizes.rows)),
          s(scratch.floats(sizes.strip)),
          dp(scratch.floats(sizes.strip)),
          ds_rows(scratch.floats(sizes.strip / 2)),
          p_pairs(scratch.floats(sizes.scores / 2)),
          ds_pairs(scratch.floats(sizes.scores / 2)),
          lse(scratch.floats(query_block)),
          delta(scratch.floats(query_block)),
          keep(scratch.bytes(sizes.keep_bytes)),
          keys(keys_),
          packed_end(keys_.begin) {}
  };

  /// Packs the blocks of keys and values up to `end` and clears their gradients, when a block of queries
  /// first needs them.
  void pack_keys(const Span& span, int64_t kv_head, int64_t end, Buffers& b) const {
    for (int64_t& key = b.packed_end; key < end; key += key_block) {
      const int64_t padded = sizes_.padded, at = (key - b.keys.begin) * padded / 2,
                    count = std::min(key_block, b.keys.end - key);
      const HeadBlock k{k_.at(span.k0 + key, kv_head), k_.row_step, count, tasks_.d},
          v{v_.at(span.k0 + key, kv_head), v_.row_step, count, tasks_.d};
      pack_along_transposed(k, padded / 2, b.k_words + at);
      pack_along_transposed(v, padded / 2, b.v_words + at);
      pack_across(k, padded, b.k_pairs + at);
      std::fill_n(b.dk + 2 * at, key_block * padded, 0.0f);
      std::fill_n(b.dv + 2 * at, key_block * padded, 0.0f);
    }
  }

  void pack_queries(const Span& span, const QueryBlock& q, int64_t head, const Buffers& b) const {
    const int64_t row = span.q0 + q.row, height = round_up(q.count, lanes), padded = sizes_.padded;
    const HeadBlock queries{q_.at(row, head), q_.row_step, q.count, tasks_.d},
        dout{dout_.at(row, head), dout_.row_step, q.count, tasks_.d};
    pack_along(queries, height, padded / 2, b.q_rows);
    pack_along(dout, height, padded / 2, b.dout_rows);
    pack_across_transposed(queries, padded, b.q_columns);
    pack_across_transposed(dout, padded, b.dout_columns);
    row_constants(a_, row, q.count, head, dout.data, dout.step, out_, 1.0f, b.lse, b.delta);
  }

  /// Accumulates the contributions of query block `q` and the key block from `key` on into dq_rows, dk and
  /// dv.
  void add_block(const Span& span, const QueryBlock& q, int64_t head, int64_t key, Buffers& b,
                 Prefetcher& prefetcher) const {
    const Block block = key_block_at(a_, span, q, key);
    const int64_t padded = sizes_.padded, words = padded / 2, at = (key - b.keys.begin) * words;
    if (keep_.drops()) b.keep.draw(keep_, block, span.q0 + q.row, head, key, span.k0 + key);
    for (int64_t first = 0; first < q.count; first += strip_queries) {
      const Block strip = strip_of(block, first);
      score_product(strip, words, b.q_rows + first * words, b.k_words + at, b.s);
      score_product(strip, words, b.dout_rows + first * words, b.v_words + at, b.dp);
      const VisibleKeys visible{strip};
      // Words of queries are multiplied in whole tiles.
      for (int64_t i = 0; i < strip_queries; i += lanes) {
        prefetcher.step();
        if (keep_.drops())
          gradient_step<true, true>(visible, first, i, b);
        else if (visible.all(i))
          gradient_step<false, false>(visible, first, i, b);
        else
          gradient_step<true, false>(visible, first, i, b);
      }
      by_query(strip, padded, b.ds_rows, b.k_pairs + at, b.dq_rows + first * padded, key > q.seen.begin);
    }
    by_key(block, padded, b.dout_columns, b.p_pairs, b.dv + 2 * at);
    by_key(block, padded, b.q_columns, b.ds_pairs, b.dk + 2 * at);
  }

  void write_dk_dv(const Span& span, int64_t kv_head, const Buffers& b) const {
    for (int64_t key = b.keys.begin; key < b.keys.end; key += key_block) {
      const int64_t row = span.k0 + key, count = std::min(key_block, b.keys.end - key),
                    at = (key - b.keys.begin) * sizes_.padded;
      unpack_transposed(count, tasks_.d, b.dk + at, a_.scale, dk_.at(row, kv_head), dk_.row_step);
      unpack_transposed(count, tasks_.d, b.dv + at, keep_.scale, dv_.at(row, kv_head), dv_.row_step);
    }
  }

 private:
  /// Computes P = exp(S - lse), dS = P (drop(dP) - delta) and drop(P) for queries [i, i + 16) of the strip
  /// from `first` on. The scales of dS and of the kept P are applied at the end.
  template <bool masked, bool dropped>
  void gradient_step(const VisibleKeys& visible, int64_t first, int64_t i, const Buffers& b) const {
    const float factor = a_.scale * log2_e;
    const float *const lse = b.lse + first, *const delta = b.delta + first;
    Range seen{0, vectors};
    if constexpr (masked) seen = visible.vectors_of(i);
    for (int64_t r = i; r < i + lanes; r += 2) {
      const KeyBits bits[2] = {masked ? visible.of(r) : 0, masked ? visible.of(r + 1) : 0};
#pragma GCC unroll 4
      for (int64_t v = 0; v < vectors; ++v) {
        Lanes p[2] = {}, ds[2] = {};
        if (!masked || (v >= seen.begin && v < seen.end)) {
#pragma GCC unroll 2
          for (int64_t u = 0; u < 2; ++u) {
            const int64_t at = (r + u) * key_block + v * lanes;
            const __mmask16 shown = bits_of_vector(bits[u], v);
            p[u] = exp2_rounded(micro::load(b.s + at) * factor - lse[r + u]);
            Lanes dp = micro::load(b.dp + at);
            __mmask16 kept = 0xffff;
            if constexpr (dropped) {
              kept = b.keep.of(first + r + u, v);
              dp = _mm512_maskz_mov_ps(kept, dp * keep_.scale);
            }
            ds[u] = p[u] * (dp - delta[r + u]);
            if constexpr (masked) {
              p[u] = _mm512_maskz_mov_ps(shown & kept, p[u]);
              ds[u] = _mm512_maskz_mov_ps(shown, ds[u]);
            }
          }
        }
        const int64_t pair = (first + r) / 2 * key_block + v * lanes;
        const __m512i ds_words = in_bf16(ds[0], ds[1]);
        micro::store(b.p_pairs + pair, paired(in_bf16(p[0], p[1])));
        micro::store(b.ds_pairs + pair, paired(ds_words));
        float* const row = b.ds_rows + r * block_words + v * lanes / 2;
        store_half<0>(row, ds_words);
        store_half<1>(row + block_words, ds_words);
      }
    }
  }
};

}  // namespace nrl::ops::NRL_ISA
