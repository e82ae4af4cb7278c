#pragma once
// The mask of attention dropout (attention_dropout.h) in GPU kernels: a block draws it for a tile of queries
// and keys into shared memory, a byte for eight keys, so that each Philox block is computed once.

#include "core/ops/attention.h"
#include "core/ops/shared/attention_dropout.h"
#include "core/ops/shared/gpu/dropout_mask.cuh"

namespace nrl::ops::NRL_GPU {

/// Passed to kernels by value.
class KeepMask {
 public:
  KeepMask() = default;
  /// `heads`: of q, which `slice` may say is a part of all.
  KeepMask(const FusedDropout& d, const HeadSlice& slice, int64_t heads)
      : scale(attention::keep_scale(d.p)),
        seed_(d.seed),
        stream_(d.stream),
        step_(static_cast<const int64_t*>(d.step.data)),
        first_row_(d.first_row),
        first_head_(slice.first),
        heads_(slice.all > 0 ? slice.all : heads),
        below_(attention::drop_below(d.p)) {}

  float scale = 1;  ///< of the kept probabilities
  bool drops() const { return below_ > 0; }

  /// Draws the mask of queries [row, row + Rows) of all, and keys [key, key + Keys) of the sequence, where
  /// key and Keys are multiples of 8. A barrier must follow before it is read.
  template <int Rows, int Keys>
  __device__ __forceinline__ void draw(unsigned char* tile, int64_t row, int head, int key) const {
    constexpr int bytes = Keys / attention::keys_per_block;
    const uint64_t stream = dropout_stream(stream_, step_);
    for (int i = static_cast<int>(threadIdx.x); i < Rows * bytes; i += static_cast<int>(blockDim.x)) {
      const uint64_t block =
          attention::philox_block_of(first_row_ + row + i / bytes, heads_, first_head_ + head,
                                     key / attention::keys_per_block + i % bytes);
      const uint4 w = philox4x32_words(block, stream, seed_);
      const unsigned words[4] = {w.x, w.y, w.z, w.w};
      unsigned bits = 0;
#pragma unroll
      for (int e = 0; e < attention::keys_per_block; ++e)
        bits |= static_cast<unsigned>((words[e / 2] >> 16 * (e % 2) & 0xffffu) >= below_) << e;
      tile[i] = static_cast<unsigned char>(bits);
    }
  }

 private:
  uint64_t seed_ = 0, stream_ = 0;
  const int64_t* step_ = nullptr;
  int64_t first_row_ = 0, first_head_ = 0, heads_ = 0;
  unsigned below_ = 0;
};

/// Whether the probability of query `i` and key `j` of a tile with `Keys` keys stays.
template <int Keys>
__device__ __forceinline__ bool kept(const unsigned char* tile, int i, int j) {
  return tile[i * (Keys / attention::keys_per_block) + j / attention::keys_per_block] >>
             j % attention::keys_per_block &
         1;
}

/// Calls run(bool_constant): kernels without dropout are compiled without it.
template <class Run>
void with_dropout(const KeepMask& mask, const Run& run) {
  mask.drops() ? run(std::true_type()) : run(std::false_type());
}

}  // namespace nrl::ops::NRL_GPU
