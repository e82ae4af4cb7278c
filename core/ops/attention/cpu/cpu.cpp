#include <cstring>
#include <limits>

#include "core/device/cpu/parallel.h"
#include "core/ops/attention/cpu/blocks.h"
#include "core/ops/attention/cpu/keep.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

/// What one call works on. Tensor offsets in elements.
template <class T>
struct Operand {
  T* data;
  int64_t token, head;
  explicit Operand(const Tensor& t) : data(static_cast<T*>(t.data)), token(t.step(0)), head(t.step(1)) {}
  T* at(int64_t row, int64_t h) const { return data + row * token + h * head; }
};

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

/// The part of `keys` that queries [row, row + count) of a sequence see; whole key blocks at the front.
template <class Arguments>
Range visible_keys(const Arguments& a, const Span& span, int64_t row, int64_t count, const Range& keys) {
  const Mask mask{a.causal, a.window, row + span.offset};
  return {std::max(keys.begin, mask.key_begin(0) / key_block * key_block), mask.key_end(count - 1, keys.end)};
}

template <class T>
struct Forward {
  const AttentionForward& a;
  Sequences sequences;
  Operand<const T> q, k, v;
  Operand<T> out;
  int64_t heads, kv_heads, group, d, padded, part_count, threads;
  KeepMask kept;
  std::byte* memory;
  ForwardBuffers sizes;

  Forward(Exec& exec, const AttentionForward& args)
      : a(args),
        sequences("attention_forward", a.cu_q, a.cu_k, a.q.dim(0), a.k.dim(0)),
        q(a.q),
        k(a.k),
        v(a.v),
        out(a.out),
        heads(a.q.dim(1)),
        kv_heads(a.k.dim(1)),
        group(heads / kv_heads),
        d(a.q.dim(2)),
        padded(round_up(d, lane_multiple)),
        part_count(parts(exec.threads, sequences.count * kv_heads, sequences.longest)),
        threads(exec.threads),
        kept(a.dropout, heads),
        sizes(padded, sequences.longest) {
    memory =
        Scratch("attention_forward", exec.workspace).bytes(static_cast<size_t>(exec.threads) * sizes.bytes());
    cpu::parallel_tasks(exec.threads, part_count * sequences.count * kv_heads,
                        [this](int64_t item, int64_t thread) { task(item, thread); });
  }

  /// The last rows of causal attention cost most: they go first, so that no thread is left alone with them.
  void task(int64_t item, int64_t thread) const {
    const int64_t head = item % kv_heads, sequence = item / kv_heads % sequences.count;
    const int64_t part = part_count - 1 - item / kv_heads / sequences.count;
    const Span span(sequences, sequence);
    const int64_t rows = round_up(ceil_div(span.queries, part_count), query_block);
    const int64_t begin = std::min(part * rows, span.queries), end = std::min(begin + rows, span.queries);
    if (begin == end) return;

    Scratch scratch("attention_forward",
                    {memory + static_cast<size_t>(thread) * sizes.bytes(), sizes.bytes()});
    float* keys = scratch.floats(sizes.packed);
    float* values = scratch.floats(sizes.packed);
    float* result = scratch.floats(sizes.rows);
    float* columns = scratch.floats(sizes.columns);
    float* scores = scratch.floats(sizes.scores);
    float* maximum = scratch.floats(sizes.lanes);
    float* sum = scratch.floats(sizes.lanes);

    int64_t first = -1,
            packed = 0;  // keys [first, packed) are packed; they are when a block first needs them
    for (int64_t row = begin; row < end; row += query_block) {
      const int64_t count = std::min(query_block, end - row);
      const Range seen = visible_keys(a, span, row, count, {0, span.keys});
      if (first < 0) first = packed = seen.begin;
      if (packed < seen.end) {
        pack_rows(seen.end - packed, d, padded, k.at(span.k0 + packed, head), k.token,
                  keys + (packed - first) * padded);
        pack_rows(seen.end - packed, d, padded, v.at(span.k0 + packed, head), v.token,
                  values + (packed - first) * padded);
        packed = seen.end;
      }
      for (int64_t h = head * group; h < (head + 1) * group; ++h) {
        Ahead ahead(d * static_cast<int64_t>(sizeof(T)));
        const int64_t next = std::min(row + query_block, end), more = std::min(query_block, end - next);
        if (h + 1 < (head + 1) * group) {
          ahead.add(q.at(span.q0 + row, h + 1), q.token, count);
        } else if (more > 0) {
          const int64_t keys_end = visible_keys(a, span, next, more, {0, span.keys}).end;
          ahead.add(q.at(span.q0 + next, head * group), q.token, more);
          ahead.add(k.at(span.k0 + packed, head), k.token, keys_end - packed);
          ahead.add(v.at(span.k0 + packed, head), v.token, keys_end - packed);
        } else {
          prefetch_task(item + threads, ahead);
        }
        ahead.add(out.at(span.q0 + row, h), out.token, count);
        ahead.spread(2 * tiles_per_product * ceil_div(seen.end - seen.begin, key_block));

        pack_block<T>(count, d, padded, q.at(span.q0 + row, h), q.token, nullptr, columns);
        std::fill_n(maximum, query_block, lowest);
        std::fill_n(sum, query_block, 0.0f);
        bool accumulate = false;
        for (int64_t key = seen.begin; key < seen.end; key += key_block) {
          const Block block(count, std::min(key_block, seen.end - key),
                            {a.causal, a.window, row + span.offset - key});
          score_product(block, d, keys + (key - first) * padded, padded, columns, scores, ahead);
          for (int64_t i = 0; i < count; i += lanes) {
            const float factor = a.scale * log2_e;
            const Vec rescale = block.full ? softmax_step<false>(block, i, factor, scores, maximum, sum)
                                           : softmax_step<true>(block, i, factor, scores, maximum, sum);
            if (accumulate) rescale_rows(std::min<int64_t>(lanes, count - i), rescale, result + i * padded);
            if (kept.drops())
              kept.drop_block(span.q0 + row + i, h, key, block.keys_of(i, lanes), scores + i, query_block);
          }
          by_query(block, padded, scores, values + (key - first) * padded, result, accumulate, ahead);
          accumulate = true;
        }
        if (!accumulate) std::memset(result, 0, static_cast<size_t>(count * padded) * sizeof(float));
        finish(span.q0 + row, count, h, result, maximum, sum);
      }
    }
  }

  /// The first rows of another task, which this thread will probably do next.
  void prefetch_task(int64_t item, Ahead& ahead) const {
    if (item >= part_count * sequences.count * kv_heads) return;
    const int64_t head = item % kv_heads;
    const Span span(sequences, item / kv_heads % sequences.count);
    ahead.add(q.at(span.q0, head * group), q.token, std::min(query_block, span.queries));
    ahead.add(k.at(span.k0, head), k.token, std::min(key_block, span.keys));
    ahead.add(v.at(span.k0, head), v.token, std::min(key_block, span.keys));
  }

  void rescale_rows(int64_t count, Vec rescale, float* result) const {
    alignas(64) float factors[lanes];
    micro::store(factors, rescale);
    for (int64_t r = 0; r < count; ++r, result += padded) {
      if (factors[r] == 1.0f) continue;
      for (int64_t c = 0; c < padded; c += lanes)
        micro::store(result + c, micro::load(result + c) * factors[r]);
    }
  }

  void finish(int64_t row, int64_t count, int64_t h, const float* result, const float* maximum,
              float* sum) const {
    if (a.lse) {
      float* lse = static_cast<float*>(a.lse.data) + h * a.lse.step(0) + row;
      alignas(64) float logs[query_block];
      for (int64_t i = 0; i < count; i += lanes) {
        const Vec l = micro::load(sum + i);
        const Vec value = (micro::load(maximum + i) + micro::log2(l)) * ln_2;
        micro::store(logs + i,
                     micro::select(l == 0.0f, micro::splat(-std::numeric_limits<float>::infinity()), value));
      }
      std::memcpy(lse, logs, static_cast<size_t>(count) * sizeof(float));
    }
    for (int64_t r = 0; r < count; ++r)
      unpack_rows(1, d, padded, result + r * padded, sum[r] == 0.0f ? 0.0f : kept.scale / sum[r],
                  out.at(row + r, h), 0);
  }
};

template <class T>
struct Backward {
  const AttentionBackward& a;
  Sequences sequences;
  Operand<const T> dout, q, k, v, out;
  Operand<T> dq, dk, dv;
  int64_t heads, kv_heads, group, d, padded, part_count, threads;
  std::byte* memory;
  float* partial = nullptr;  ///< (part, token, head, padded) when there are parts
  KeepMask kept;
  BackwardBuffers sizes;

  Backward(Exec& exec, const AttentionBackward& args)
      : a(args),
        sequences("attention_backward", a.cu_q, a.cu_k, a.q.dim(0), a.k.dim(0)),
        dout(a.dout),
        q(a.q),
        k(a.k),
        v(a.v),
        out(a.out),
        dq(a.dq),
        dk(a.dk),
        dv(a.dv),
        heads(a.q.dim(1)),
        kv_heads(a.k.dim(1)),
        group(heads / kv_heads),
        d(a.q.dim(2)),
        padded(round_up(d, lane_multiple)),
        part_count(parts(exec.threads, sequences.count * kv_heads, sequences.longest)),
        threads(exec.threads),
        kept(a.dropout, heads),
        sizes(padded, sequences.longest) {
    Scratch scratch("attention_backward", exec.workspace);
    memory = scratch.bytes(static_cast<size_t>(exec.threads) * sizes.bytes());
    if (part_count > 1) partial = scratch.floats(part_count * partial_dq(a.q.dim(0), heads, padded));
    cpu::parallel_tasks(exec.threads, part_count * sequences.count * kv_heads,
                        [this](int64_t item, int64_t thread) { task(item, thread); });
    if (part_count > 1)
      cpu::parallel_tasks(exec.threads, sequences.count * heads,
                          [this](int64_t item, int64_t) { add_parts(item / heads, item % heads); });
  }

  float* partial_at(int64_t part, int64_t token, int64_t h) const {
    return partial + ((part * a.q.dim(0) + token) * heads + h) * padded;
  }

  /// Keys [begin, end) of a part.
  Range part_keys(const Span& span, int64_t part) const {
    const int64_t rows = round_up(ceil_div(span.keys, part_count), key_block);
    const int64_t begin = std::min(part * rows, span.keys);
    return {begin, std::min(begin + rows, span.keys)};
  }

  void task(int64_t item, int64_t thread) const {
    const int64_t head = item % kv_heads, sequence = item / kv_heads % sequences.count;
    const int64_t part = item / kv_heads / sequences.count;
    const Span span(sequences, sequence);
    const Range keys = part_keys(span, part);
    const int64_t length = keys.end - keys.begin;

    Scratch scratch("attention_backward",
                    {memory + static_cast<size_t>(thread) * sizes.bytes(), sizes.bytes()});
    float* k_rows = scratch.floats(sizes.packed);
    float* v_rows = scratch.floats(sizes.packed);
    float* dk_rows = scratch.floats(sizes.packed);
    float* dv_rows = scratch.floats(sizes.packed);
    float* q_rows = scratch.floats(sizes.rows);
    float* dout_rows = scratch.floats(sizes.rows);
    float* dq_rows = scratch.floats(sizes.rows);
    float* q_columns = scratch.floats(sizes.columns);
    float* dout_columns = scratch.floats(sizes.columns);
    float* p = scratch.floats(sizes.scores);
    float* ds = scratch.floats(sizes.scores);
    float* lse = scratch.floats(sizes.lanes);
    float* delta = scratch.floats(sizes.lanes);

    int64_t packed = keys.begin;  // keys before it are packed and their gradients cleared
    const auto pack_keys = [&](int64_t until) {
      if (packed >= until) return;
      const int64_t at = (packed - keys.begin) * padded;
      const auto bytes = static_cast<size_t>((until - packed) * padded) * sizeof(float);
      pack_rows(until - packed, d, padded, k.at(span.k0 + packed, head), k.token, k_rows + at);
      pack_rows(until - packed, d, padded, v.at(span.k0 + packed, head), v.token, v_rows + at);
      std::memset(dk_rows + at, 0, bytes);
      std::memset(dv_rows + at, 0, bytes);
      packed = until;
    };
    for (int64_t row = 0; row < span.queries; row += query_block) {
      const int64_t count = std::min(query_block, span.queries - row);
      const Range seen = visible_keys(a, span, row, count, keys);
      if (seen.begin >= seen.end) {
        for (int64_t h = head * group; part_count == 1 && h < (head + 1) * group; ++h)
          clear_dq(span.q0 + row, count, h);
        continue;
      }
      pack_keys(seen.end);
      for (int64_t h = head * group; h < (head + 1) * group; ++h) {
        Ahead ahead(d * static_cast<int64_t>(sizeof(T)));
        const bool last_head = h + 1 == (head + 1) * group;
        const int64_t next = last_head ? row + query_block : row,
                      next_head = last_head ? head * group : h + 1;
        if (next < span.queries) {
          const int64_t more = std::min(query_block, span.queries - next);
          const int64_t keys_end = visible_keys(a, span, next, more, keys).end;
          prefetch_queries(span.q0 + next, more, next_head, ahead);
          ahead.add(k.at(span.k0 + packed, head), k.token, keys_end - packed);
          ahead.add(v.at(span.k0 + packed, head), v.token, keys_end - packed);
        } else {
          prefetch_task(item + threads, ahead);
          ahead.add(dk.at(span.k0 + keys.begin, head), dk.token, length);
          ahead.add(dv.at(span.k0 + keys.begin, head), dv.token, length);
        }
        if (part_count == 1) ahead.add(dq.at(span.q0 + row, h), dq.token, count);
        ahead.spread(5 * tiles_per_product * ceil_div(seen.end - seen.begin, key_block));

        pack_block(count, d, padded, q.at(span.q0 + row, h), q.token, q_rows, q_columns);
        pack_block(count, d, padded, dout.at(span.q0 + row, h), dout.token, dout_rows, dout_columns);
        row_constants(span.q0 + row, count, h, dout_rows, lse, delta);
        for (int64_t key = seen.begin; key < seen.end; key += key_block) {
          const Block block(count, std::min(key_block, seen.end - key),
                            {a.causal, a.window, row + span.offset - key});
          const int64_t at = (key - keys.begin) * padded;
          score_product(block, d, k_rows + at, padded, q_columns, p, ahead);
          score_product(block, d, v_rows + at, padded, dout_columns, ds, ahead);
          const Place place{span.q0 + row, h, key};
          for (int64_t i = 0; i < count; i += lanes) {
            if (kept.drops())
              block.full ? gradient_step<false, true>(block, i, place, p, ds, lse, delta)
                         : gradient_step<true, true>(block, i, place, p, ds, lse, delta);
            else
              block.full ? gradient_step<false, false>(block, i, place, p, ds, lse, delta)
                         : gradient_step<true, false>(block, i, place, p, ds, lse, delta);
          }
          by_key(block, padded, p, dout_rows, dv_rows + at, ahead);
          by_key(block, padded, ds, q_rows, dk_rows + at, ahead);
          by_query(block, padded, ds, k_rows + at, dq_rows, key > seen.begin, ahead);
        }
        if (part_count == 1)
          unpack_rows(count, d, padded, dq_rows, a.scale, dq.at(span.q0 + row, h), dq.token);
        else
          for (int64_t r = 0; r < count; ++r)
            std::memcpy(partial_at(part, span.q0 + row + r, h), dq_rows + r * padded,
                        static_cast<size_t>(padded) * sizeof(float));
      }
    }
    pack_keys(keys.end);  // keys that nobody saw have gradient zero
    unpack_rows(length, d, padded, dk_rows, a.scale, dk.at(span.k0 + keys.begin, head), dk.token);
    unpack_rows(length, d, padded, dv_rows, kept.scale, dv.at(span.k0 + keys.begin, head), dv.token);
  }

  void prefetch_queries(int64_t row, int64_t count, int64_t h, Ahead& ahead) const {
    ahead.add(q.at(row, h), q.token, count);
    ahead.add(dout.at(row, h), dout.token, count);
    ahead.add(out.at(row, h), out.token, count);
  }

  /// The first rows of another task, which this thread will probably do next.
  void prefetch_task(int64_t item, Ahead& ahead) const {
    if (item >= part_count * sequences.count * kv_heads) return;
    const int64_t head = item % kv_heads;
    const Span span(sequences, item / kv_heads % sequences.count);
    prefetch_queries(span.q0, std::min(query_block, span.queries), head * group, ahead);
    ahead.add(k.at(span.k0, head), k.token, std::min(key_block, span.keys));
    ahead.add(v.at(span.k0, head), v.token, std::min(key_block, span.keys));
  }

  /// Where a block lies: its first query among all, the query head, its first key in the sequence.
  struct Place {
    int64_t row, head, key;
  };

  /// P = exp(S - lse) and dS = P (drop(dP) - delta), then drop(P); the scales of scores and of what is kept
  /// are left for the end but for that of dP. p holds S^T and ds dP^T.
  template <bool masked, bool dropped>
  void gradient_step(const Block& b, int64_t i, [[maybe_unused]] const Place& place, float* p, float* ds,
                     const float* lse, const float* delta) const {
    const float factor = a.scale * log2_e;
    const Vec l = micro::load(lse + i), shift = micro::load(delta + i);
    Range keys{0, b.keys};
    [[maybe_unused]] const LaneMask visible(b, i);
    if constexpr (masked) keys = visible.keys;
    const auto step = [&](int64_t j, [[maybe_unused]] micro::IntVec keep) __attribute__((always_inline)) {
      float* p_at = p + j * query_block + i;
      float* ds_at = ds + j * query_block + i;
      Vec x = micro::exp2(micro::load(p_at) * factor - l), dp = micro::load(ds_at);
      if constexpr (dropped) dp = micro::select(keep, dp * kept.scale, Vec{});
      Vec y = x * (dp - shift);
      if constexpr (masked) {
        const micro::IntVec seen = visible(j);
        x = micro::select(seen, x, Vec{});
        y = micro::select(seen, y, Vec{});
      }
      if constexpr (dropped) x = micro::select(keep, x, Vec{});
      micro::store(p_at, x);
      micro::store(ds_at, y);
    };
    if constexpr (dropped) {
      kept.for_keys(place.row + i, place.head, place.key, keys, step);
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
  void row_constants(int64_t row, int64_t count, int64_t h, const float* dout_rows, float* lse,
                     float* delta) const {
    const float* from = static_cast<const float*>(a.lse.data) + h * a.lse.step(0) + row;
    std::fill_n(lse, query_block, 0.0f);
    std::fill_n(delta, query_block, 0.0f);
    for (int64_t r = 0; r < count; ++r) {
      // A query that sees no key has lse = -infinity; its probabilities are masked, they must only stay
      // finite.
      lse[r] = from[r] == -std::numeric_limits<float>::infinity() ? -lowest : from[r] * log2_e;
      const T* o = out.at(row + r, h);
      const float* g = dout_rows + r * padded;
      Vec sum{};
      int64_t c = 0;
      for (; c + lanes <= d; c += lanes) sum += micro::load(g + c) * micro::load_loose(o + c);
      float rest = 0;
      for (; c < d; ++c) rest += g[c] * static_cast<float>(o[c]);
      delta[r] = micro::sum_lanes(sum) + rest;
    }
  }

  void clear_dq(int64_t row, int64_t count, int64_t h) const {
    for (int64_t r = 0; r < count; ++r) std::fill_n(dq.at(row + r, h), d, T{});
  }

  /// dq of one sequence and head from the parts that its blocks met, in order.
  void add_parts(int64_t sequence, int64_t h) const {
    const Span span(sequences, sequence);
    for (int64_t row = 0; row < span.queries; row += query_block) {
      const int64_t count = std::min(query_block, span.queries - row);
      float* total = nullptr;
      for (int64_t part = 0; part < part_count; ++part) {
        const Range seen = visible_keys(a, span, row, count, part_keys(span, part));
        if (seen.begin >= seen.end) continue;
        if (!total) {
          total = partial_at(part, span.q0 + row, h);
          continue;
        }
        const float* more = partial_at(part, span.q0 + row, h);
        for (int64_t r = 0; r < count; ++r)
          for (int64_t c = r * heads * padded; c < r * heads * padded + padded; c += lanes)
            micro::store(total + c, micro::load(total + c) + micro::load(more + c));
      }
      if (!total) {
        clear_dq(span.q0 + row, count, h);
        continue;
      }
      for (int64_t r = 0; r < count; ++r)
        unpack_rows(1, d, padded, total + r * heads * padded, a.scale, dq.at(span.q0 + row + r, h), 0);
    }
  }
};

void forward_kernel(Exec& exec, const AttentionForward& a) {
  for_float_type(a.q.dtype, [&]<class T>() { Forward<T>(exec, a); });
}

void backward_kernel(Exec& exec, const AttentionBackward& a) {
  for_float_type(a.q.dtype, [&]<class T>() { Backward<T>(exec, a); });
}

}  // namespace

void fill_attention(KernelTable& table) {
  table.attention_forward = forward_kernel;
  table.attention_backward = backward_kernel;
}

}  // namespace nrl::ops::NRL_ISA
