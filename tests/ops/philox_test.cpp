// Philox4x32-10 has three bodies, for scalar code, the vector code of the CPU and GPU kernels. All must give
// the known answers of Random123 (Salmon et al. 2011), and the same words everywhere else.

#define NRL_ISA test_isa
#define NRL_GPU test_gpu

#include "core/base/philox.h"

#include "core/ops/shared/cpu/dropout_mask.h"
#include "core/ops/shared/gpu/dropout_mask.cuh"
#include "tests/catch.h"

using namespace nrl;

namespace {

PhiloxBlock of_cpu_kernels(uint64_t block, uint64_t stream, uint64_t seed) {
  constexpr uint64_t chunk = ops::test_isa::dropout_chunk_blocks;
  // The last block of its chunk, so that the counter within a chunk is tested too.
  uint32_t words[4 * chunk];
  ops::test_isa::philox_chunk(block - (chunk - 1), stream, seed, words);
  PhiloxBlock out;
  std::copy_n(words + 4 * (chunk - 1), 4, out.begin());
  return out;
}

PhiloxBlock of_gpu_kernels(uint64_t block, uint64_t stream, uint64_t seed) {
  const uint4 words = ops::test_gpu::philox4x32_words(block, stream, seed);
  return {words.x, words.y, words.z, words.w};
}

}  // namespace

TEST_CASE("every body of Philox4x32-10 gives the known answers", "[philox]") {
  struct Answer {
    uint64_t block, stream, seed;
    PhiloxBlock words;
  };
  const Answer answers[] = {
      {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {0x85a308d3243f6a88,
       0x0370734413198a2e,
       0x299f31d0a4093822,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Answer& a : answers) {
    CHECK(philox4x32(a.block, a.stream, a.seed) == a.words);
    CHECK(of_cpu_kernels(a.block, a.stream, a.seed) == a.words);
    CHECK(of_gpu_kernels(a.block, a.stream, a.seed) == a.words);
  }
  for (uint64_t i = 0; i < 1000; ++i) {
    const uint64_t block = i << (i % 54), stream = i * 0x9e3779b97f4a7c15, seed = ~stream;
    const PhiloxBlock words = philox4x32(block, stream, seed);
    CHECK(of_cpu_kernels(block, stream, seed) == words);
    CHECK(of_gpu_kernels(block, stream, seed) == words);
  }
}
