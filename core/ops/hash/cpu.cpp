// Hashes on the CPU; the formula is in core/ops/hash.h. With i counted from the first word of a block, the
// sum is (2 first + 1) * sum of word[i] + 2 * sum of word[i] * i: products of 32 bits, for which every
// instruction set has vectors.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

/// Words of which the weighted sum fits into `Sum`.
template <class Word>
constexpr int64_t block = sizeof(Word) == 4   ? 1 << 14
                          : sizeof(Word) == 2 ? 256
                                              : 4096;

template <class Word>
uint64_t block_hash(const Word* x, uint32_t n, uint64_t first) {
  using Sum = std::conditional_t<sizeof(Word) == 4, uint64_t, uint32_t>;
  Sum sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t word = x[i];
    sum += word;
    weighted += Sum{word} * i;
  }
  return (2 * first + 1) * sum + 2 * uint64_t{weighted};
}

template <class Word>
void add_words(Exec& exec, const AddHash& a) {
  const auto* x = static_cast<const Word*>(a.x.data);
  const int64_t n = a.x.numel();
  constexpr int64_t grain = 1 << 16;
  std::atomic<uint64_t> total{0};
  cpu::parallel_for(exec.threads, n, grain, [&](int64_t begin, int64_t end) {
    uint64_t part = 0;
    for (int64_t at = begin; at < end; at += block<Word>)
      part += block_hash(x + at, static_cast<uint32_t>(std::min(block<Word>, end - at)),
                         static_cast<uint64_t>(a.first + at));
    total += part;
  });
  auto* out = data_of<int64_t>(a.out);
  *out = static_cast<int64_t>(static_cast<uint64_t>(*out) + total);
}

void add_hash_kernel(Exec& exec, const AddHash& a) {
  switch (size_of(a.x.dtype)) {
    case 4:
      return add_words<uint32_t>(exec, a);
    case 2:
      return add_words<uint16_t>(exec, a);
    default:
      return add_words<uint8_t>(exec, a);
  }
}

}  // namespace

void fill_hash(KernelTable& table) {
  table.add_hash = add_hash_kernel;
}

}  // namespace nrl::ops::NRL_ISA
