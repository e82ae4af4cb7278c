#include <cstring>
#include <limits>

#include "core/device/cpu/parallel.h"
#include "core/ops/attention/micro.h"
#include "core/ops/attention/plan.h"
#include "core/ops/cpu_families.h"
#include "core/ops/kernel_table.h"
#include "core/ops/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

using namespace attention;
using micro::lanes;
using micro::Range;
using micro::Vec;

constexpr float log2_e = 1.44269504f, ln_2 = 0.693147181f;
constexpr float lowest = -1e30f;  // instead of minus infinity, whose difference with itself is NaN

/// to (rows x padded, f32, aligned) = from (rows x d), zeros behind d.
template <class T>
void pack_rows(int64_t rows, int64_t d, int64_t padded, const T* from, int64_t step, float* to) {
  for (int64_t r = 0; r < rows; ++r, from += step, to += padded) {
    int64_t i = 0;
    for (; i + lanes <= d; i += lanes) micro::store(to + i, micro::load_loose(from + i));
    for (; i < d; ++i) to[i] = static_cast<float>(from[i]);
    for (; i < padded; ++i) to[i] = 0;
  }
}

/// to (rows x d) = factor * from (rows x padded).
template <class T>
void unpack_rows(int64_t rows, int64_t d, int64_t padded, const float* from, float factor, T* to,
                 int64_t step) {
  for (int64_t r = 0; r < rows; ++r, from += padded, to += step) {
    int64_t i = 0;
    for (; i + lanes <= d; i += lanes) micro::store_loose(to + i, micro::load(from + i) * factor);
    for (; i < d; ++i) to[i] = static_cast<T>(from[i] * factor);
  }
}

/// columns (padded x query_block) = rows (query_block x padded) transposed; `count` rows are there, the
/// others up to the next whole vector become zero.
void transpose_rows(int64_t count, int64_t padded, float* rows, float* columns) {
  const int64_t whole = round_up(count, lanes);
  std::memset(rows + count * padded, 0, static_cast<size_t>((whole - count) * padded) * sizeof(float));
  for (int64_t i = 0; i < whole; i += lanes)
    for (int64_t c = 0; c < padded; c += lanes) {
      Vec v[lanes];
#pragma GCC unroll 16
      for (int l = 0; l < lanes; ++l) v[l] = micro::load(rows + (i + l) * padded + c);
      micro::transpose(v);
#pragma GCC unroll 16
      for (int l = 0; l < lanes; ++l) micro::store(columns + (c + l) * query_block + i, v[l]);
    }
}

/// One block of queries against one block of keys.
struct Block {
  int64_t queries, keys;
  Mask mask;
  bool full;
  Block(int64_t queries_, int64_t keys_, const Mask& mask_)
      : queries(queries_), keys(keys_), mask(mask_), full(mask_.full(queries_, keys_)) {}

  int64_t lane_queries() const { return round_up(queries, lanes); }
  /// Keys that queries [i, i + n) may see, as a range of reduction.
  Range keys_of(int64_t i, int64_t n) const {
    return {std::min(mask.key_begin(i), keys), mask.key_end(i + n - 1, keys)};
  }
  /// Queries that may see keys [j, j + n).
  Range queries_of(int64_t j, int64_t n) const {
    return {std::min(mask.query_begin(j), queries), mask.query_end(j + n - 1, queries)};
  }
};

/// s (keys x query_block) = a (keys x padded) * columns: S^T = K Q^T, or dP^T = V dO^T.
void score_product(const Block& b, int64_t d, int64_t padded, const float* a, const float* columns,
                   float* s) {
  if (b.full)
    micro::product<false>(b.keys, b.lane_queries(), a, padded, columns, query_block, s, query_block, false,
                          [d](int64_t, int64_t) {
                            return Range{0, d};
                          });
  else
    micro::staircase(b.keys, d, a, padded, columns, query_block, s, query_block,
                     [&b](int64_t j, int64_t n) { return b.queries_of(j, n); });
}

/// out (queries x padded) = or += s^T * rows: O += P V, dQ += dS K.
void by_query(const Block& b, int64_t padded, const float* s, const float* rows, float* out,
              bool accumulate) {
  micro::product<true>(b.queries, padded, s, query_block, rows, padded, out, padded, accumulate,
                       [&b](int64_t i, int64_t n) { return b.keys_of(i, n); });
}

/// out (keys x padded) += s * rows: dV += P^T dO, dK += dS^T Q.
void by_key(const Block& b, int64_t padded, const float* s, const float* rows, float* out) {
  micro::product<false>(b.keys, padded, s, query_block, rows, padded, out, padded, true,
                        [&b](int64_t j, int64_t n) { return b.queries_of(j, n); });
}

/// The keys that the lanes from query i on may see, and a test per element.
struct LaneMask {
  Range keys;
  micro::IntVec first, last;  ///< key j is visible to a lane when first <= j <= last
  LaneMask(const Block& b, int64_t i) {
    keys = b.keys_of(i, lanes);
    const micro::IntVec query = micro::iota() + static_cast<int32_t>(i + b.mask.shift);
    last = b.mask.causal ? query : micro::splat_int(std::numeric_limits<int32_t>::max());
    first = b.mask.window > 0 ? query - static_cast<int32_t>(b.mask.window - 1)
                              : micro::splat_int(std::numeric_limits<int32_t>::min());
  }
  micro::IntVec operator()(int64_t j) const {
    const micro::IntVec key = micro::splat_int(static_cast<int32_t>(j));
    return (key >= first) & (key <= last);
  }
};

/// Clears what the row tiles of by_query() and by_key() read beside the keys that a vector of lanes sees.
void clear_margins(const Block& b, const Range& keys, float* s) {
  for (int64_t j = std::max<int64_t>(0, keys.begin - std::max<int64_t>(lanes, micro::max_tile_rows));
       j < keys.begin; ++j)
    micro::store(s + j * query_block, Vec{});
  const int64_t end = std::min(b.keys, keys.end + std::max<int64_t>(lanes, micro::max_tile_rows));
  for (int64_t j = std::max(keys.begin, keys.end); j < end; ++j) micro::store(s + j * query_block, Vec{});
}

/// One step of the online softmax for the lanes from query i on: scores become probabilities relative to the
/// new maximum; returns the factor for what was summed before.
template <bool masked>
Vec softmax_step(const Block& b, int64_t i, float factor, float* scores, float* maximum, float* sum) {
  float* s = scores + i;
  Range keys{0, b.keys};
  [[maybe_unused]] const LaneMask visible(b, i);
  if constexpr (masked) keys = visible.keys;
  const Vec before = micro::load(maximum + i);
  Vec top[4] = {before, before, before, before};
  int64_t j = keys.begin;
  const auto score = [&](int64_t key) {
    const Vec x = micro::load(s + key * query_block) * factor;
    if constexpr (masked) return micro::select(visible(key), x, micro::splat(lowest));
    return x;
  };
  for (; j + 4 <= keys.end; j += 4)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) top[u] = micro::max(top[u], score(j + u));
  for (; j < keys.end; ++j) top[0] = micro::max(top[0], score(j));
  const Vec now = micro::max(micro::max(top[0], top[1]), micro::max(top[2], top[3]));
  Vec added[2] = {};
  const auto probability = [&](int64_t key) {
    float* at = s + key * query_block;
    Vec p = micro::exp2(micro::load(at) * factor - now);
    if constexpr (masked) p = micro::select(visible(key), p, Vec{});
    micro::store(at, p);
    return p;
  };
  j = keys.begin;
  for (; j + 4 <= keys.end; j += 4)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) added[u % 2] += probability(j + u);
  for (; j < keys.end; ++j) added[0] += probability(j);
  if constexpr (masked) clear_margins(b, keys, s);
  const Vec rescale = micro::exp2(before - now);
  micro::store(maximum + i, now);
  micro::store(sum + i, micro::load(sum + i) * rescale + (added[0] + added[1]));
  return rescale;
}

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

template <class T>
struct Forward {
  const AttentionForward& a;
  Sequences sequences;
  Operand<const T> q, k, v;
  Operand<T> out;
  int64_t heads, kv_heads, group, d, padded, part_count;
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
    float* rows_buffer = scratch.floats(sizes.rows);
    float* result = scratch.floats(sizes.rows);
    float* columns = scratch.floats(sizes.columns);
    float* scores = scratch.floats(sizes.scores);
    float* maximum = scratch.floats(sizes.lanes);
    float* sum = scratch.floats(sizes.lanes);

    const Mask whole{a.causal, a.window, begin + span.offset};
    const int64_t first = std::min(whole.key_begin(0) / key_block * key_block, span.keys);
    const int64_t last = std::max(first, whole.key_end(end - begin - 1, span.keys));
    pack_rows(last - first, d, padded, k.at(span.k0 + first, head), k.token, keys);
    pack_rows(last - first, d, padded, v.at(span.k0 + first, head), v.token, values);

    for (int64_t row = begin; row < end; row += query_block)
      for (int64_t h = head * group; h < (head + 1) * group; ++h) {
        const int64_t count = std::min(query_block, end - row);
        pack_rows(count, d, padded, q.at(span.q0 + row, h), q.token, rows_buffer);
        transpose_rows(count, padded, rows_buffer, columns);
        std::fill_n(maximum, query_block, lowest);
        std::fill_n(sum, query_block, 0.0f);
        const Mask here{a.causal, a.window, row + span.offset};
        bool accumulate = false;
        for (int64_t key = std::max(first, here.key_begin(0) / key_block * key_block);
             key < here.key_end(count - 1, last); key += key_block) {
          const Block block(count, std::min(key_block, last - key),
                            {a.causal, a.window, row + span.offset - key});
          score_product(block, d, padded, keys + (key - first) * padded, columns, scores);
          for (int64_t i = 0; i < count; i += lanes) {
            const float factor = a.scale * log2_e;
            const Vec rescale = block.full ? softmax_step<false>(block, i, factor, scores, maximum, sum)
                                           : softmax_step<true>(block, i, factor, scores, maximum, sum);
            if (accumulate) rescale_rows(std::min<int64_t>(lanes, count - i), rescale, result + i * padded);
          }
          by_query(block, padded, scores, values + (key - first) * padded, result, accumulate);
          accumulate = true;
        }
        if (!accumulate) std::memset(result, 0, static_cast<size_t>(count * padded) * sizeof(float));
        finish(span.q0 + row, count, h, result, maximum, sum);
      }
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
      unpack_rows(1, d, padded, result + r * padded, sum[r] == 0.0f ? 0.0f : 1.0f / sum[r],
                  out.at(row + r, h), 0);
  }
};

template <class T>
struct Backward {
  const AttentionBackward& a;
  Sequences sequences;
  Operand<const T> dout, q, k, v, out;
  Operand<T> dq, dk, dv;
  int64_t heads, kv_heads, group, d, padded, part_count;
  std::byte* memory;
  float* partial = nullptr;  ///< (part, token, head, padded) when there are parts
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

  /// The part of `keys` that a block of queries from `row` on sees; whole key blocks at the front.
  Range visible_keys(const Span& span, int64_t row, const Range& keys) const {
    const int64_t count = std::min(query_block, span.queries - row);
    const Mask mask{a.causal, a.window, row + span.offset};
    return {std::max(keys.begin, mask.key_begin(0) / key_block * key_block),
            mask.key_end(count - 1, keys.end)};
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

    pack_rows(length, d, padded, k.at(span.k0 + keys.begin, head), k.token, k_rows);
    pack_rows(length, d, padded, v.at(span.k0 + keys.begin, head), v.token, v_rows);
    std::memset(dk_rows, 0, static_cast<size_t>(length * padded) * sizeof(float));
    std::memset(dv_rows, 0, static_cast<size_t>(length * padded) * sizeof(float));

    for (int64_t row = 0; row < span.queries; row += query_block) {
      const int64_t count = std::min(query_block, span.queries - row);
      const Range seen = visible_keys(span, row, keys);
      for (int64_t h = head * group; h < (head + 1) * group; ++h) {
        if (seen.begin >= seen.end) {
          if (part_count == 1) clear_dq(span.q0 + row, count, h);
          continue;
        }
        pack_rows(count, d, padded, q.at(span.q0 + row, h), q.token, q_rows);
        pack_rows(count, d, padded, dout.at(span.q0 + row, h), dout.token, dout_rows);
        transpose_rows(count, padded, q_rows, q_columns);
        transpose_rows(count, padded, dout_rows, dout_columns);
        row_constants(span.q0 + row, count, h, dout_rows, lse, delta);
        float* dq_at = part_count == 1 ? dq_rows : nullptr;
        for (int64_t key = seen.begin; key < seen.end; key += key_block) {
          const Block block(count, std::min(key_block, keys.end - key),
                            {a.causal, a.window, row + span.offset - key});
          const int64_t at = (key - keys.begin) * padded;
          score_product(block, d, padded, k_rows + at, q_columns, p);
          score_product(block, d, padded, v_rows + at, dout_columns, ds);
          for (int64_t i = 0; i < count; i += lanes)
            block.full ? gradient_step<false>(block, i, p, ds, lse, delta)
                       : gradient_step<true>(block, i, p, ds, lse, delta);
          by_key(block, padded, p, dout_rows, dv_rows + at);
          by_key(block, padded, ds, q_rows, dk_rows + at);
          by_query(block, padded, ds, k_rows + at, dq_rows, key > seen.begin);
        }
        if (dq_at)
          unpack_rows(count, d, padded, dq_rows, a.scale, dq.at(span.q0 + row, h), dq.token);
        else
          for (int64_t r = 0; r < count; ++r)
            std::memcpy(partial_at(part, span.q0 + row + r, h), dq_rows + r * padded,
                        static_cast<size_t>(padded) * sizeof(float));
      }
    }
    unpack_rows(length, d, padded, dk_rows, a.scale, dk.at(span.k0 + keys.begin, head), dk.token);
    unpack_rows(length, d, padded, dv_rows, 1.0f, dv.at(span.k0 + keys.begin, head), dv.token);
  }

  /// P = exp(S - lse) and dS = P (dP - delta), the scale left for the end; p holds S^T and ds dP^T.
  template <bool masked>
  void gradient_step(const Block& b, int64_t i, float* p, float* ds, const float* lse,
                     const float* delta) const {
    const float factor = a.scale * log2_e;
    const Vec l = micro::load(lse + i), shift = micro::load(delta + i);
    Range keys{0, b.keys};
    [[maybe_unused]] const LaneMask visible(b, i);
    if constexpr (masked) keys = visible.keys;
#pragma GCC unroll 4
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      float* p_at = p + j * query_block + i;
      float* ds_at = ds + j * query_block + i;
      Vec x = micro::exp2(micro::load(p_at) * factor - l);
      Vec y = x * (micro::load(ds_at) - shift);
      if constexpr (masked) {
        const micro::IntVec seen = visible(j);
        x = micro::select(seen, x, Vec{});
        y = micro::select(seen, y, Vec{});
      }
      micro::store(p_at, x);
      micro::store(ds_at, y);
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
        const Range seen = visible_keys(span, row, part_keys(span, part));
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
