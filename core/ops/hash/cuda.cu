// Hashes on the GPU; the formula is in core/ops/hash.h.
//
// hash_kernel   every thread reads packs of 16 bytes, a grid apart; adds to out (+=) once per warp. A pack of
// words
//               w[k] from place b on is (2 b + 1) * sum of w[k] + 2 * sum of k w[k], which takes one product
//               of 64 bits.

#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

constexpr int threads = 256, packs_ahead = 4;
using Sum = unsigned long long;

/// The words of a pack of 16 bytes that begins at place `at`.
template <class Word>
__device__ __forceinline__ Sum pack_hash(const Pack<Word>& pack, Sum at) {
  constexpr int in_register = 4 / static_cast<int>(sizeof(Word)), bits = 8 * static_cast<int>(sizeof(Word));
  constexpr unsigned mask = static_cast<unsigned>((Sum{1} << bits) - 1);
  const unsigned registers[4] = {pack.raw[0].x, pack.raw[0].y, pack.raw[0].z, pack.raw[0].w};
  // Sums of 8 and 16 bits fit into 32 bits.
  using Small = std::conditional_t<sizeof(Word) == 4, Sum, unsigned>;
  Small sum = 0, weighted = 0;
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int k = 0; k < in_register; ++k) {
      const Small word = registers[r] >> (bits * k) & mask;
      sum += word;
      weighted += word * static_cast<Small>(r * in_register + k);
    }
  return (2 * at + 1) * sum + 2 * Sum{weighted};
}

template <class Word>
__global__ void __launch_bounds__(threads)
    hash_kernel(const Word* __restrict__ x, int64_t n, Sum first, bool vectors, Sum* out) {
  constexpr int width = per_pack<Word>;
  const int64_t packs = vectors ? n / width : 0, all = int64_t{gridDim.x} * threads,
                thread = int64_t{blockIdx.x} * threads + threadIdx.x;
  Sum sum = 0;
  for (int64_t p = thread; p < packs; p += all * packs_ahead) {
    Pack<Word> pack[packs_ahead];
#pragma unroll
    for (int u = 0; u < packs_ahead; ++u)
      if (p + u * all < packs) pack[u].load(x + (p + u * all) * width);
#pragma unroll
    for (int u = 0; u < packs_ahead; ++u)  // zeros add nothing
      sum += pack_hash(pack[u], first + static_cast<Sum>((p + u * all) * width));
  }
  for (int64_t i = packs * width + thread; i < n; i += all)
    sum += (2 * (first + static_cast<Sum>(i)) + 1) * Sum{x[i]};
#pragma unroll
  for (int o = warp / 2; o; o >>= 1) sum += __shfl_xor_sync(all_lanes, sum, o);
  if (threadIdx.x % warp == 0) atomicAdd(out, sum);
}

template <class Word>
void launch(Exec& exec, const AddHash& a) {
  const int64_t n = a.x.numel();
  NRL_LAUNCH((hash_kernel<Word>),
             grid_for(n, int64_t{threads} * packs_ahead * per_pack<Word>, exec.multiprocessors), threads, 0,
             exec.stream, static_cast<const Word*>(a.x.data), n, static_cast<Sum>(a.first),
             aligned16(a.x.data), static_cast<Sum*>(a.out.data));
}

void add_hash_launch(Exec& exec, const AddHash& a) {
  switch (size_of(a.x.dtype)) {
    case 4:
      return launch<uint32_t>(exec, a);
    case 2:
      return launch<uint16_t>(exec, a);
    default:
      return launch<uint8_t>(exec, a);
  }
}

}  // namespace

void fill_hash(KernelTable& table) {
  table.add_hash = add_hash_launch;
}

}  // namespace nrl::ops::NRL_GPU
