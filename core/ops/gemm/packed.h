#pragma once
// GEMM on packed operands:
//
//   c (rows, columns) = or += a b + bias
//
// for operands of f32 and 16 bits in f32 vectors, and with AVX512_BF16 for bf16 operands with vdpbf16ps,
// which multiplies pairs of bf16 and adds both products to an f32 sum (with AMX: packed_amx.h). Operands are
// copied into panels of 32-bit words [word of the inner dimension][row of a or column of b]; a word is an f32
// or two neighboring bf16 of the inner dimension. A thread packs the rows of a that it works on; the panels
// of b are packed once and shared, or where a is small each by the thread that uses it up. For few columns
// tiles read the rows of a in place.
//
// An element of c is summed in the order of the inner dimension, whatever the other dimensions and the
// threads: results depend on neither.

#include <array>
#include <atomic>
#include <utility>

#include "core/device/cpu/parallel.h"
#include "core/ops/gemm/pack.h"

namespace nrl::ops::NRL_ISA::packed {

/// Where a block of sums goes: += `add` and bias, rounded to 16 bits where the result has them.
struct Result {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  int64_t ld = 0;
  const float* add = nullptr;  ///< f32 sums to add; may be an f32 result itself
  int64_t add_ld = 0;
  bool accumulate = false;  ///< adds the old values of a 16-bit result
  const float* bias = nullptr;

  /// The address of an element.
  std::byte* of(int64_t row, int64_t column) const { return data + (row * ld + column) * size_of(dtype); }
  Result at(int64_t row, int64_t column) const {
    Result r = *this;
    r.data = of(row, column);
    if (add) r.add += row * add_ld + column;
    if (bias) r.bias += column;
    return r;
  }
};

/// Writes sums to a result of elements T.
template <class T>
NRL_INLINE void finish(Lanes sum, const Result& c, int64_t row, int64_t column, const FirstLanes& valid) {
  if (c.bias) sum += valid.load(c.bias + column);
  if (c.add) sum += valid.load(c.add + row * c.add_ld + column);
  T* const to = static_cast<T*>(static_cast<void*>(c.data)) + row * c.ld + column;
  if (sizeof(T) < sizeof(float) && c.accumulate) sum += valid.load(to);
  valid.store(to, sum);
}

/// A word in all lanes.
NRL_INLINE Lanes word(const std::byte* p) {
  float x;
  std::memcpy(&x, p, sizeof x);
  return x - Lanes{};
}

/// A tile prefetches words of its panels, which come from the second-level cache. In b the hardware's
/// prefetcher falls behind only where vectors are wide.
inline constexpr int64_t a_words_ahead = 16, b_words_ahead = lanes == 16 ? 8 : 0;

/// One tile: `rows` rows of a against two vectors of columns of b. The words of a are in a panel, or in rows
/// `ld` bytes apart.
template <class T, int rows, bool packed>
void tile(int64_t words, const std::byte* a, int64_t ld, const float* b, const Result& c, int64_t columns) {
  const FirstLanes left(columns), right(columns - lanes);
  Lanes sum[rows][2];
#pragma GCC unroll 14
  for (int i = 0; i < rows; ++i) sum[i][0] = sum[i][1] = Lanes{};
  const auto add_words = [&](int64_t w, int64_t end) __attribute__((always_inline)) {
// A word of a small tile is little work beside the loop around it.
#if defined(NRL_ISA_avx512)
#pragma GCC unroll 2
#else
#pragma GCC unroll 4
#endif
    for (; w < end; ++w) {
      if constexpr (packed) __builtin_prefetch(a + (w + a_words_ahead) * rows * 4);
      const float* const row = b + w * 2 * lanes;
      if constexpr (b_words_ahead > 0) {
        __builtin_prefetch(row + b_words_ahead * 2 * lanes);
        __builtin_prefetch(row + b_words_ahead * 2 * lanes + lanes);
      }
      const Lanes b0 = load(row), b1 = load(row + lanes);
#pragma GCC unroll 14
      for (int i = 0; i < rows; ++i) {
        const Lanes x = word(a + (packed ? (w * rows + i) * 4 : w * 4 + i * ld));
        sum[i][0] = Words<T>::multiply_add(x, b0, sum[i][0]);
        sum[i][1] = Words<T>::multiply_add(x, b1, sum[i][1]);
      }
    }
  };
  // Rows of the result are fetched one by one: all at once they would hold up the panels.
  for (int i = 0; i < rows; ++i) {
    const std::byte* const to = c.of(i, 0);
    __builtin_prefetch(to, 1);
    __builtin_prefetch(to + lanes * size_of(c.dtype), 1);
    add_words(words * i / rows, words * (i + 1) / rows);
  }
  for_float_type(c.dtype, [&]<class C>() {
#pragma GCC unroll 14
    for (int i = 0; i < rows; ++i) {
      finish<C>(sum[i][0], c, i, 0, left);
      finish<C>(sum[i][1], c, i, lanes, right);
    }
  });
}

using Tile = void (*)(int64_t, const std::byte*, int64_t, const float*, const Result&, int64_t);
template <class T, bool packed, size_t... rows>
constexpr std::array<Tile, sizeof...(rows)> tiles_of(std::index_sequence<rows...>) {
  return {tile<T, static_cast<int>(rows) + 1, packed>...};
}
/// By rows - 1.
template <class T, bool packed>
inline constexpr auto tiles = tiles_of<T, packed>(std::make_index_sequence<vector_tile.rows>());

struct Product {
  int64_t rows = 0, columns = 0, inner = 0;
  Operand a, b;
  Tensor c;  ///< (rows, columns) f32, bf16 or f16
  bool accumulate = false;
  const float* bias = nullptr;  ///< optional (columns)
};

/// True if tiles read the rows of `a` where they are: whole words of rows that do not compete for the same
/// sets of the first-level cache, for so few columns that panels would not pay.
template <class T>
bool reads_in_place(const Product& p) {
  constexpr int64_t few_columns = 1024, cache_way = 4096;
  const int64_t row_bytes = p.a.ld * static_cast<int64_t>(sizeof(T));
  return p.columns <= few_columns && p.a.dtype == dtype_of<T>::value && !p.a.transposed &&
         p.inner % Words<T>::per == 0 && row_bytes % cache_way != 0;
}

/// Tiles of rows of a against a batch of stripes of columns of b.
struct Task {
  const Tiling& tiling;
  int64_t from, to;    ///< tiles
  bool in_place;       ///< rows of a lie where they are, not in panels
  const std::byte* a;  ///< the first row or panel
  int64_t ld;          ///< in place: bytes between rows
  const float* b;      ///< panels of the stripes, one after the other
  int64_t words;       ///< of the inner dimension
  Result c;            ///< of the first row and column
  int64_t columns;     ///< of all stripes
  float* sums;         ///< scratch of Blocks::tile_sums floats

  int64_t row(int64_t tile) const { return tiling.begin(tile) - tiling.begin(from); }
};

/// How multiply() packs rows of `a` and multiplies: on vector registers.
template <class T>
struct VectorKernel {
  using Element = T;
  static constexpr TileSize size = vector_tile;
  struct Thread {};  ///< exists on a thread while it multiplies
  static bool in_place(const Product& p) { return reads_in_place<T>(p); }
  static constexpr auto pack = pack_group<T>;
  static void multiply(const Task& t) {
    const auto& run = t.in_place ? tiles<T, false> : tiles<T, true>;
    const int64_t row_bytes = t.in_place ? t.ld : t.words * 4;
    for (int64_t i = t.from; i < t.to; ++i) {
      const int64_t row = t.row(i);
      const Tile tile = run[static_cast<size_t>(t.tiling.height(i) - 1)];
      for (int64_t column = 0; column < t.columns; column += size.columns)
        tile(t.words, t.a + row * row_bytes, t.ld, t.b + column * t.words, t.c.at(row, column),
             t.columns - column);
    }
  }
};

/// One block: the rows of `a` from `row`, the columns of `b` from `column`, the inner elements from `k`.
struct Range {
  int64_t row, rows, column, columns, k, inner;
};

/// Scratch memory of a product: panels and sums of each thread, and the panels of b that all share.
struct Panels {
  float *a, *b, *tile_sums;
};

/// Packs the columns of b and multiplies them with all rows of a. Each thread packs the rows of a that it
/// works on, a group of tiles at a time, which then stays in its second-level cache while the columns of b
/// pass by.
template <class Kernel>
void multiply_block(int threads, const Product& p, const Range& r, const Blocks& blocks, const Panels& panels,
                    const Result& c) {
  using T = typename Kernel::Element;
  constexpr int64_t stripe_columns = Kernel::size.columns;
  const int64_t filled = (r.inner + Words<T>::per - 1) / Words<T>::per,
                words = Kernel::size.padded_words(filled);
  const int64_t stripes = (r.columns + stripe_columns - 1) / stripe_columns;
  const Tiling tiling(r.rows, Kernel::size);
  const int64_t groups = (tiling.count + blocks.group - 1) / blocks.group;
  const int64_t batch = std::clamp<int64_t>(groups * stripes / (16 * threads), 1, blocks.batch);
  const int64_t batches = (stripes + batch - 1) / batch;
  // With one group a stripe of b is needed once: a thread has one place for a batch.
  const bool once = groups == 1 && !p.b.transposed;
  const auto stripe = [&](int64_t s, int64_t me = 0) {
    return panels.b + (once ? me * batch + s % batch : s) * stripe_columns * words;
  };
  const auto width = [&](int64_t s) { return std::min(r.columns - s * stripe_columns, stripe_columns); };
  const auto pack_stripe = [&](int64_t s, int64_t me) {
    float* const panel = stripe(s, me);
    with_part<T>(p.b, r.column + s * stripe_columns, r.k,
                 [&](const auto& x) { pack_rows<T>(x, width(s), stripe_columns, r.inner, panel); });
    std::fill(panel + filled * stripe_columns, panel + words * stripe_columns, 0.0f);
  };
  // All stripes of a few rows of the memory before the next rows, which may be pages away.
  const int64_t chunks = p.b.transposed ? (words + words_together - 1) / words_together : 0;
  const auto pack_chunk = [&](int64_t chunk) {
    const int64_t begin = chunk * words_together, end = std::min(words, begin + words_together);
    for (int64_t s = 0; s < stripes; ++s) {
      with_part<T>(p.b, r.column + s * stripe_columns, r.k, [&](const auto& x) {
        pack_transposed<T>(x, width(s), stripe_columns, r.inner, begin, std::min(filled, end), stripe(s));
      });
      if (end > filled)
        std::fill(stripe(s) + std::max(begin, filled) * stripe_columns, stripe(s) + end * stripe_columns,
                  0.0f);
    }
  };
  const bool in_place = Kernel::in_place(p);
  // Units are pairs of a group and a batch of stripes.
  struct Thread : Kernel::Thread {
    int64_t me;  ///< within the team
    float *panels, *sums;
    int64_t packed = -1;  ///< the group that `panels` hold
  };
  const auto thread = [&](int64_t me) {
    return Thread{{}, me, panels.a + me * blocks.a_size(), panels.tile_sums + me * blocks.tile_sums};
  };
  const auto work = [&](int64_t unit, Thread& own) {
    const int64_t g = unit / batches, s = unit % batches * batch;
    Task task{.tiling = tiling,
              .from = tiling.count * g / groups,
              .to = tiling.count * (g + 1) / groups,
              .in_place = in_place,
              .a = reinterpret_cast<const std::byte*>(own.panels),
              .ld = p.a.ld * static_cast<int64_t>(sizeof(T)),
              .b = stripe(s, own.me),
              .words = words,
              .c = {},
              .columns = std::min(r.columns - s * stripe_columns, batch * stripe_columns),
              .sums = own.sums};
    const int64_t row = tiling.begin(task.from);
    task.c = c.at(row, s * stripe_columns);
    if (in_place)
      task.a = reinterpret_cast<const std::byte*>(Part<T>(p.a, r.row + row, r.k).data);
    else if (own.packed != g)
      Kernel::pack(p.a, r.row, tiling, task.from, task.to, r.k, r.inner, own.panels);
    own.packed = g;
    Kernel::multiply(task);
  };
  // The first group multiplies a batch that is packed right before while the cache has it.
  const auto first_work = [&](int64_t u, Thread& own) {
    if (!p.b.transposed)
      for (int64_t s = u * batch; s < std::min(stripes, (u + 1) * batch); ++s) pack_stripe(s, own.me);
    work(u, own);
  };
  const int64_t units = groups * batches;
  constexpr int64_t too_little = 32768;  // a thread team would cost more than it saves
  const int64_t team = r.rows * r.columns * r.inner < too_little ? 1 : std::min<int64_t>(threads, units);
  if (team <= 1) {
    Thread own = thread(0);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) pack_chunk(chunk);
    for (int64_t u = 0; u < batches; ++u) first_work(u, own);
    for (int64_t u = batches; u < units; ++u) work(u, own);
    return;
  }
  // Threads take shrinking ranges of units. A unit of a later group waits until its batch is packed: the
  // thread that packs it took it earlier and waits for nothing.
  std::atomic<int64_t> next{0};
  std::array<std::atomic<int>, block_columns / stripe_columns> ready{};
#pragma omp parallel num_threads(static_cast <int>(team))
  {
    Thread own = thread(omp_get_thread_num());
    if (chunks > 0) {
#pragma omp for schedule(static)
      for (int64_t chunk = 0; chunk < chunks; ++chunk) pack_chunk(chunk);
    }
    for (int64_t from = next; from < units;) {
      const int64_t left = (from < batches ? batches : units) - from;
      const int64_t to = from + std::max<int64_t>(1, left / team);
      if (!next.compare_exchange_weak(from, to)) continue;
      for (int64_t u = from; u < to; ++u) {
        std::atomic<int>& batch_ready = ready[static_cast<size_t>(u % batches)];
        if (u < batches) {
          first_work(u, own);
          batch_ready.store(1, std::memory_order_release);
          batch_ready.notify_all();
        } else {
          batch_ready.wait(0, std::memory_order_acquire);
          work(u, own);
        }
      }
      from = next;
    }
  }
}

/// The whole product, with scratch of Blocks::bytes(). A kernel of bf16 multiplies operands that both are.
template <class Kernel>
void multiply(int threads, const Product& p, Scratch& scratch) {
  if (p.rows == 0 || p.columns == 0) return;
  const bool rounded = p.c.dtype != DType::f32;
  const Blocks blocks(p.rows, p.columns, p.inner, sizeof(typename Kernel::Element), rounded, Kernel::size);
  const Panels panels{.a = scratch.floats(threads * blocks.a_size()),
                      .b = scratch.floats(blocks.b_size(threads)),
                      .tile_sums = scratch.floats(threads * blocks.tile_sums)};
  float* const sums = scratch.floats(blocks.sums_size());
  const int64_t ld = p.c.step(0);
  for (int64_t i = 0; i < p.rows; i += blocks.rows)
    for (int64_t j = 0; j < p.columns; j += blocks.columns)
      for (int64_t k = 0; k == 0 || k < p.inner; k += blocks.inner) {  // empty sums are written, too
        const Range r{.row = i,
                      .rows = std::min(blocks.rows, p.rows - i),
                      .column = j,
                      .columns = std::min(blocks.columns, p.columns - j),
                      .k = k,
                      .inner = std::min(blocks.inner, p.inner - k)};
        const bool first_piece = k == 0, last_piece = k + blocks.inner >= p.inner;
        Result c;
        if (rounded && !last_piece) {
          c.data = reinterpret_cast<std::byte*>(sums);
          c.ld = r.columns;
        } else {
          c = {.data = data_of<std::byte>(p.c), .dtype = p.c.dtype, .ld = ld};
          c.data = c.of(i, j);
          c.accumulate = rounded && p.accumulate;
        }
        if (last_piece && p.bias) c.bias = p.bias + j;
        if (!first_piece || (p.accumulate && !rounded)) {
          c.add = rounded ? sums : reinterpret_cast<float*>(c.data);
          c.add_ld = rounded ? r.columns : ld;
        }
        multiply_block<Kernel>(threads, p, r, blocks, panels, c);
      }
}

}  // namespace nrl::ops::NRL_ISA::packed
