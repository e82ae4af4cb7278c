#pragma once
// The steps of blocked attention, compiled once per instruction set: packing, prefetching, the GEMMs of one
// block of queries with one block of keys under a mask, and the online softmax.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/ops/attention/cpu/fp8.h"
#include "core/ops/attention/cpu/micro.h"
#include "core/ops/attention/cpu/plan.h"

namespace nrl::ops::NRL_ISA {

using namespace attention;
using micro::Range;
using micro::Vec;

constexpr float log2_e = 1.44269504f, ln_2 = 0.693147181f;
constexpr float lowest = -1e30f;  // instead of minus infinity, whose difference with itself is NaN

/// to (rows x padded, f32, aligned) = from (rows x d), zero from column d on.
template <class T>
void pack_rows(int64_t rows, int64_t d, int64_t padded, const T* from, int64_t step, float* to) {
  for (int64_t r = 0; r < rows; ++r, from += step, to += padded) {
    int64_t i = 0;
    for (; i + lanes <= d; i += lanes) micro::store(to + i, load(from + i));
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
    for (; i + lanes <= d; i += lanes) store(to + i, micro::load(from + i) * factor);
    for (; i < d; ++i) to[i] = static_cast<T>(from[i] * factor);
  }
}

/// Loads row elements [c, c + lanes), zero from d on.
template <class T>
inline Vec load_edge(const T* row, int64_t c, int64_t d) {
  alignas(64) float part[lanes] = {};
  for (int64_t i = c; i < std::min(d, c + lanes); ++i) part[i - c] = static_cast<float>(row[i]);
  return micro::load(part);
}

/// A block of `count` queries, as columns (padded x query_block) and, unless it is null, as rows (count x
/// padded). Columns up to the next whole vector of queries are zero.
template <class T>
void pack_block(int64_t count, int64_t d, int64_t padded, const T* from, int64_t step, float* rows,
                float* columns) {
  for (int64_t i = 0; i < count; i += lanes)
    for (int64_t c = 0; c < padded; c += lanes) {
      Vec v[lanes];
      const T* at = from + i * step;
      if (i + lanes <= count && c + lanes <= d) {
#pragma GCC unroll 16
        for (int l = 0; l < lanes; ++l) v[l] = load(at + l * step + c);
      } else {
        for (int l = 0; l < lanes; ++l) v[l] = i + l < count ? load_edge(at + l * step, c, d) : Vec{};
      }
      if (rows)
        for (int l = 0; l < std::min<int64_t>(lanes, count - i); ++l)
          micro::store(rows + (i + l) * padded + c, v[l]);
      transpose(v);
#pragma GCC unroll 16
      for (int l = 0; l < lanes; ++l) micro::store(columns + (c + l) * query_block + i, v[l]);
    }
}

/// Software prefetch of rows that will be read or written soon: hardware prefetchers do not follow the stride
/// between heads. A few rows are requested between the tiles of the GEMMs.
class Prefetcher {
 public:
  explicit Prefetcher(int64_t row_bytes) : row_bytes_(row_bytes) {}

  template <class T>
  void add(T* at, int64_t step, int64_t rows) {
    if (rows <= 0 || count_ == max_pieces) return;
    pieces_[count_++] = {reinterpret_cast<const char*>(at), step * static_cast<int64_t>(sizeof(T)), rows};
    total_ += rows;
  }
  /// Distributes the added prefetches over `steps` calls of step().
  void spread(int64_t steps) { per_step_ = ceil_div(total_, std::max<int64_t>(steps, 1)); }

  void step() {
    for (int64_t left = per_step_; left > 0 && current_ < count_;) {
      Piece& p = pieces_[current_];
      for (; left > 0 && p.rows > 0; --left, --p.rows, p.at += p.step)
        for (int64_t b = 0; b < row_bytes_; b += 64) __builtin_prefetch(p.at + b, 0, 2);
      if (p.rows == 0) ++current_;
    }
  }
  void clear() { count_ = current_ = 0, total_ = 0; }

 private:
  static constexpr int max_pieces = 12;
  struct Piece {
    const char* at;
    int64_t step, rows;
  };
  Piece pieces_[max_pieces];
  int count_ = 0, current_ = 0;
  int64_t total_ = 0, per_step_ = 0, row_bytes_;
};
/// Tiles of the GEMM of two blocks, at least (a diagonal block has fewer than a full one).
constexpr int64_t tiles_per_gemm = 7;

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

/// s (keys x query_block) = a (keys x d, rows `step` apart) * columns: S^T = K Q^T, or dP^T = V dO^T.
inline void score_product(const Block& b, int64_t d, const float* a, int64_t step, const float* columns,
                          float* s, Prefetcher& prefetcher) {
  if (b.full)
    micro::product<false>(b.keys, b.lane_queries(), a, step, columns, query_block, s, query_block, false,
                          [d, &prefetcher](int64_t, int64_t) {
                            prefetcher.step();
                            return Range{0, d};
                          });
  else
    micro::staircase(b.keys, d, a, step, columns, query_block, s, query_block, [&](int64_t j, int64_t n) {
      prefetcher.step();
      return b.queries_of(j, n);
    });
}

/// out (queries x padded) = or += s^T * rows: O += P V, dQ += dS K.
inline void by_query(const Block& b, int64_t padded, const float* s, const float* rows, float* out,
                     bool accumulate, Prefetcher& prefetcher) {
  micro::product<true>(b.queries, padded, s, query_block, rows, padded, out, padded, accumulate,
                       [&](int64_t i, int64_t n) {
                         prefetcher.step();
                         return b.keys_of(i, n);
                       });
}

/// out (keys x padded) += s * rows: dV += P^T dO, dK += dS^T Q.
inline void by_key(const Block& b, int64_t padded, const float* s, const float* rows, float* out,
                   Prefetcher& prefetcher) {
  micro::product<false>(b.keys, padded, s, query_block, rows, padded, out, padded, true,
                        [&](int64_t j, int64_t n) {
                          prefetcher.step();
                          return b.queries_of(j, n);
                        });
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

/// Clears the elements that the row tiles of by_query() and by_key() read outside the keys that a vector of
/// lanes sees.
inline void clear_margins(const Block& b, const Range& keys, float* s) {
  for (int64_t j = std::max<int64_t>(0, keys.begin - std::max<int64_t>(lanes, micro::max_tile_rows));
       j < keys.begin; ++j)
    micro::store(s + j * query_block, Vec{});
  const int64_t end = std::min(b.keys, keys.end + std::max<int64_t>(lanes, micro::max_tile_rows));
  for (int64_t j = std::max(keys.begin, keys.end); j < end; ++j) micro::store(s + j * query_block, Vec{});
}

/// Probabilities as they are multiplied in FP8: numbers of E4M3.
NRL_ALWAYS Vec probability_code(Vec p) {
  return rounded_to<DType::e4m3>(p * probability_code_scale);
}

/// One step of the online softmax for the lanes from query i on: p = exp2(factor * s - m) with the new row
/// maximum m replaces the scores, and row_max and row_sum are updated. Returns the factor exp2(old m - m) for
/// sums over earlier keys. `fp8`: p becomes probability_code_scale * p in E4M3 after it has been summed, and
/// m is rounded up to an integer, so that what rounding loses does not depend on the order of the keys.
template <bool masked, bool fp8>
Vec softmax_step(const Block& b, int64_t i, float factor, float* scores, float* row_max, float* row_sum) {
  float* s = scores + i;
  Range keys{0, b.keys};
  [[maybe_unused]] const LaneMask visible(b, i);
  if constexpr (masked) keys = visible.keys;
  const Vec old_max = micro::load(row_max + i);
  Vec partial_max[4] = {old_max, old_max, old_max, old_max};
  int64_t j = keys.begin;
  const auto score = [&](int64_t key) {
    const Vec x = micro::load(s + key * query_block) * factor;
    if constexpr (masked) return micro::select(visible(key), x, micro::splat(lowest));
    return x;
  };
  for (; j + 4 <= keys.end; j += 4)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) partial_max[u] = max(partial_max[u], score(j + u));
  for (; j < keys.end; ++j) partial_max[0] = max(partial_max[0], score(j));
  Vec new_max = max(max(partial_max[0], partial_max[1]), max(partial_max[2], partial_max[3]));
  if constexpr (fp8) new_max = micro::ceil(new_max);
  Vec partial_sum[2] = {};
  const auto probability = [&](int64_t key) {
    float* at = s + key * query_block;
    Vec p = micro::exp2(micro::load(at) * factor - new_max);
    if constexpr (masked) p = micro::select(visible(key), p, Vec{});
    micro::store(at, fp8 ? probability_code(p) : p);
    return p;
  };
  j = keys.begin;
  for (; j + 4 <= keys.end; j += 4)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) partial_sum[u % 2] += probability(j + u);
  for (; j < keys.end; ++j) partial_sum[0] += probability(j);
  if constexpr (masked) clear_margins(b, keys, s);
  const Vec rescale = micro::exp2(old_max - new_max);
  micro::store(row_max + i, new_max);
  micro::store(row_sum + i, micro::load(row_sum + i) * rescale + (partial_sum[0] + partial_sum[1]));
  return rescale;
}

}  // namespace nrl::ops::NRL_ISA
