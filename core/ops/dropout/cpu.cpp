#include "core/ops/dropout/dropout.h"

#include "core/device/cpu/parallel.h"
#include "core/ops/cpu_families.h"
#include "core/ops/kernel_table.h"
#include "core/ops/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t chunk_blocks = 64;

/// Philox4x32-10 for the blocks [first, first + chunk_blocks), as core/base/philox.h computes them one by
/// one; the words of block j land in out[4 j ...].
void philox_chunk(uint64_t first, uint64_t stream, uint64_t seed, uint32_t* out) {
#pragma omp simd
  for (int64_t j = 0; j < chunk_blocks; ++j) {
    const uint64_t counter = first + static_cast<uint64_t>(j);
    uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
    uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
      const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
      const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(p1);
      c3 = static_cast<uint32_t>(p0);
      c0 = n0;
      c2 = n2;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    out[4 * j] = c0;
    out[4 * j + 1] = c1;
    out[4 * j + 2] = c2;
    out[4 * j + 3] = c3;
  }
}

template <class T>
void mask_chunk(const T* x, T* out, const uint32_t* words, int64_t n, float p, float scale) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float uniform = static_cast<float>(static_cast<int32_t>(words[i] >> 8)) * 0x1.0p-24f;
    const float scaled = static_cast<float>(x[i]) * scale;
    store(out[i], uniform >= p ? scaled : 0.0f);
  }
}

template <class T>
void run(Exec& exec, const Dropout& a) {
  const int64_t n = a.x.dim(0), h = a.x.dim(1);
  const float scale = 1.0f / (1.0f - a.p), p = a.p;
  cpu::parallel_for(exec.threads, n, std::max<int64_t>(1, 8192 / h), [&](int64_t begin, int64_t end) {
    alignas(64) uint32_t bits[4 * chunk_blocks];
    for (int64_t r = begin; r < end; ++r) {
      const T* x = data_of<const T>(a.x) + r * a.x.stride[0];
      T* out = data_of<T>(a.out) + r * a.out.stride[0];
      // Global elements [at, last) of this row, a chunk of whole Philox blocks at a time.
      int64_t at = (a.first_row + r) * h;
      const int64_t last = at + h;
      while (at < last) {
        const int64_t skip = at % 4, count = std::min(last - at, 4 * chunk_blocks - skip);
        philox_chunk(static_cast<uint64_t>(at / 4), a.stream, a.seed, bits);
        mask_chunk(x, out, bits + skip, count, p, scale);
        x += count;
        out += count;
        at += count;
      }
    }
  });
}

void dropout_kernel(Exec& exec, const Dropout& a) {
  for_float_type(a.x.dtype, [&]<class T>() { run<T>(exec, a); });
}

}  // namespace

void fill_dropout(KernelTable& table) {
  table.dropout = dropout_kernel;
}

}  // namespace nrl::ops::NRL_ISA
