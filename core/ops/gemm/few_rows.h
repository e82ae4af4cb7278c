#pragma once
// GEMM of few rows with a weight, as in a pass of decoding:
//
//   c (n, m) = x (n, k) w (m, k)^T + bias
//
// bound by the bandwidth of w, which is read once and where it lies. The transposed product is computed:
// `lanes` rows of w at a time against panels [word][row of x]. An element is summed as in packed.h, with the
// same bits.

#include "core/ops/gemm/packed.h"

namespace nrl::ops::NRL_ISA::packed {

/// Rows up to which it is faster than packing the weight.
inline constexpr int64_t few_rows = 32;

/// A product of few rows. `a`: x; `b`: w; neither is transposed.
struct FewRows {
  const Product& p;
  const float* panels = nullptr;  ///< of x, `lanes` rows each, one after the other
  int64_t words = 0;              ///< of a panel
  int64_t count() const { return (p.rows + lanes - 1) / lanes; }
};

/// True if a product has few rows, and the panels of x fit into the scratch memory that multiply() has for
/// the weight.
template <class Kernel>
bool has_few_rows(const Product& p) {
  const Blocks blocks(p.rows, p.columns, p.inner, sizeof(typename Kernel::Element), p.c.dtype != DType::f32);
  const int64_t padded = (p.rows + lanes - 1) / lanes * lanes;
  return p.rows <= few_rows && !p.accumulate && !p.a.transposed && !p.b.transposed && p.inner > 0 &&
         padded * Kernel::size.padded_words((p.inner + Words<typename Kernel::Element>::per - 1) /
                                            Words<typename Kernel::Element>::per) <=
             blocks.columns * blocks.words;
}

/// Writes sums[row of w][row of x] of `rows` rows of w from `row` on, and `lanes` rows of x from `column` on.
NRL_INLINE void write_transposed(const Product& p, Lanes (&sums)[lanes], int64_t row, int64_t rows,
                                 int64_t column) {
  transpose(sums);
  const FirstLanes valid(rows);
  const int64_t columns = std::min<int64_t>(lanes, p.rows - column);
  for_float_type(p.c.dtype, [&]<class C>() {
    C* const to = data_of<C>(p.c) + column * p.c.step(0) + row;
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i)
      if (i < columns) valid.store(to + i * p.c.step(0), sums[i]);
  });
}

/// The sums of `rows` rows of w from `row` on with one panel.
template <class T, class S>
void multiply_few(const FewRows& f, int64_t row, int64_t rows, int64_t panel_index) {
  constexpr int64_t per = Words<T>::per, piece = piece_bytes / static_cast<int64_t>(sizeof(T));
  const Product& p = f.p;
  const float* const panel = f.panels + panel_index * f.words * lanes;
  const S* const w = static_cast<const S*>(p.b.data) + row * p.b.ld;
  alignas(64) float words[lanes * lanes];
  Lanes total[lanes] = {};
  for (int64_t begin = 0; begin < p.inner; begin += piece) {
    const int64_t end = std::min(p.inner, begin + piece);
    Lanes sum[lanes] = {};
    for (int64_t k = begin; k < end; k += lanes * per) {
#pragma GCC unroll 16
      for (int64_t r = 0; r < lanes; ++r) {
        const S* const from = w + std::min(r, rows - 1) * p.b.ld + k;
        // The same words of the next rows, to the second-level cache.
        __builtin_prefetch(from + lanes * p.b.ld, 0, 2);
        store(words + r * lanes, Words<T>::along(from, end - k));
      }
      const float* b = panel + k / per * lanes;
      const int64_t left = std::min<int64_t>(lanes, (end - k + per - 1) / per);
      for (int64_t i = 0; i < left; ++i, b += lanes) {
        const Lanes x = load(b);
#pragma GCC unroll 16
        for (int r = 0; r < lanes; ++r)
          sum[r] = Words<T>::multiply_add(word(reinterpret_cast<const std::byte*>(words + r * lanes + i)), x,
                                          sum[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < lanes; ++r) {
      if (end == p.inner && p.bias) sum[r] += p.bias[row + std::min<int64_t>(r, rows - 1)];
      total[r] = begin == 0 ? sum[r] : sum[r] + total[r];
    }
  }
  write_transposed(p, total, row, rows, panel_index * lanes);
}

template <class Kernel>
struct FewRowsKernel;

template <class T>
struct FewRowsKernel<VectorKernel<T>> {
  static constexpr int64_t block = lanes;  ///< rows of w
  struct Thread {};
  static bool suits(const Product&) { return true; }
  static void multiply(const FewRows& f, int64_t row, int64_t rows) {
    with_part<T>(f.p.b, 0, 0, [&]<class S>(const Part<S>&) {
      for (int64_t i = 0; i < f.count(); ++i) multiply_few<T, S>(f, row, rows, i);
    });
  }
};

/// The whole product, if it has few rows; false: nothing was done. The scratch memory of multiply() suffices.
template <class Kernel>
bool multiply_few_rows(int threads, const Product& p, Scratch& scratch) {
  using Few = FewRowsKernel<Kernel>;
  using T = typename Kernel::Element;
  if (!has_few_rows<Kernel>(p) || !Few::suits(p)) return false;
  const int64_t filled = (p.inner + Words<T>::per - 1) / Words<T>::per;
  FewRows f{.p = p, .words = Kernel::size.padded_words(filled)};
  float* const panels = scratch.floats(f.count() * f.words * lanes);
  f.panels = panels;
  for (int64_t i = 0; i < f.count(); ++i) {
    float* const panel = panels + i * f.words * lanes;
    with_part<T>(p.a, i * lanes, 0, [&](const auto& x) {
      pack_rows<T>(x, std::min<int64_t>(lanes, p.rows - i * lanes), lanes, p.inner, panel);
    });
    std::fill(panel + filled * lanes, panel + f.words * lanes, 0.0f);
  }
  constexpr int64_t too_little = 32768;  // a thread team would cost more than it saves
  const int64_t blocks = (p.columns + Few::block - 1) / Few::block;
  cpu::parallel_for(threads, blocks, std::max<int64_t>(1, too_little / (Few::block * p.rows * p.inner)),
                    [&](int64_t begin, int64_t end) {
                      [[maybe_unused]] const typename Few::Thread own;
                      for (int64_t i = begin; i < end; ++i)
                        Few::multiply(f, i * Few::block, std::min(Few::block, p.columns - i * Few::block));
                    });
  return true;
}

}  // namespace nrl::ops::NRL_ISA::packed
