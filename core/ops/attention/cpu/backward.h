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
#include <type_traits>

#include "core/ops/attention/cpu/backward_tasks.h"
#include "core/ops/shared/check.h"

namespace nrl::ops::NRL_ISA {

/// Factors of the sums. In FP8 they are over products of codes, `delta` over codes of dout times out.
struct SumScales {
  float score, dprobability, delta, ds_code, dq, dk, dv;
  SumScales(const AttentionBackward& a, float keep)
      : score(a.scale), dprobability(1), delta(1), ds_code(1), dq(a.scale), dk(a.scale), dv(keep) {
    if (!is_fp8(a.q)) return;
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
};

/// T: of q, k and v, and G: of dout, both in FP8 or as Out.
template <class T, class G, class Out>
class Backward : public BackwardTasks<Backward<T, G, Out>, BackwardBuffers, T, G, Out> {
  static constexpr bool fp8 = !std::is_same_v<T, Out>;
  using Base = BackwardTasks<Backward, BackwardBuffers, T, G, Out>;
  using Base::a_, Base::dk_, Base::dout_, Base::dv_, Base::k_, Base::keep_, Base::out_, Base::q_,
      Base::tasks_, Base::v_;

 public:
  Backward(Exec& exec, const AttentionBackward& a) : Backward(exec, a, SumScales(a, KeepMask(a).scale)) {}

  struct Thread {};
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

  void pack_queries(const Span& span, const QueryBlock& q, int64_t head, const Buffers& b) const {
    const int64_t row = span.q0 + q.row, d = tasks_.d, padded = tasks_.padded;
    pack_block(q.count, d, padded, q_.at(row, head), q_.row_step, b.q_rows, b.q_columns);
    pack_block(q.count, d, padded, dout_.at(row, head), dout_.row_step, b.dout_rows, b.dout_columns);
    row_constants(a_, row, q.count, head, b.dout_rows, padded, out_, scales_.delta, b.lse, b.delta);
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

  void write_dk_dv(const Span& span, int64_t kv_head, const Buffers& b) const {
    const int64_t row = span.k0 + b.keys.begin, count = b.keys.end - b.keys.begin;
    unpack_rows(count, tasks_.d, tasks_.padded, b.dk_rows, scales_.dk, dk_.at(row, kv_head), dk_.row_step);
    unpack_rows(count, tasks_.d, tasks_.padded, b.dv_rows, scales_.dv, dv_.at(row, kv_head), dv_.row_step);
  }

 private:
  Backward(Exec& exec, const AttentionBackward& a, const SumScales& scales)
      : Base(exec, a, scales.dq, 5 * tiles_per_gemm), scales_(scales) {}

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

  SumScales scales_;
};

}  // namespace nrl::ops::NRL_ISA
