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
  /// `a`: AttentionForward or AttentionBackward.
  template <class Arguments>
  explicit KeepMask(const Arguments& a)
      : scale(attention::keep_scale(a.dropout.p)),
        seed_(a.dropout.seed),
        stream_(a.dropout.stream),
        step_(static_cast<const int64_t*>(a.dropout.step.data)),
        first_row_(a.dropout.first_row),
        first_head_(a.slice.first),
        heads_(a.slice.all > 0 ? a.slice.all : a.q.dim(1)),
        below_(attention::drop_below(a.dropout.p)),
        rows_(static_cast<const int*>(a.dropout.rows.data)),
        places_(static_cast<const int*>(a.key_places.data)) {}

  float scale = 1;  ///< of the kept probabilities
  bool drops() const { return below_ > 0; }

  /// Draws the mask of queries [query, query + Rows) and keys [key, key + Keys) of sequence `s`, where key
  /// and Keys are multiples of 8. A barrier must follow before it is read.
  template <int Rows, int Keys, class Sequence>
  __device__ __forceinline__ void draw(unsigned char* tile, const Sequence& s, int query, int head,
                                       int key) const {
    if (places_) return draw_placed<Rows, Keys>(tile, s, query, head, key);
    constexpr int bytes = Keys / attention::keys_per_block;
    const int64_t row = s.q_begin + query;
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
  /// draw() with the rows and places of a table. Rows and keys past the end of the sequence are not read.
  template <int Rows, int Keys, class Sequence>
  __device__ __forceinline__ void draw_placed(unsigned char* tile, const Sequence& s, int query, int head,
                                              int key) const {
    constexpr int bytes = Keys / attention::keys_per_block;
    const uint64_t stream = dropout_stream(stream_, step_);
    for (int i = static_cast<int>(threadIdx.x); i < Rows * bytes; i += static_cast<int>(blockDim.x)) {
      const int at = query + i / bytes, first = key + i % bytes * attention::keys_per_block;
      unsigned bits = 0;
      if (at < s.queries) {
        const int64_t row = first_row_ + rows_[s.q_begin + at];
        int drawn = -1;
        unsigned words[4] = {};
        for (int e = 0; e < attention::keys_per_block && first + e < s.keys; ++e) {
          const int place = places_[s.k_begin + first + e], block = place / attention::keys_per_block,
                    lane = place % attention::keys_per_block;
          if (block != drawn) {
            drawn = block;
            const uint4 w = philox4x32_words(
                attention::philox_block_of(row, heads_, first_head_ + head, block), stream, seed_);
            words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
          }
          const unsigned low = lane & 2 ? words[1] : words[0], high = lane & 2 ? words[3] : words[2];
          const unsigned word = lane & 4 ? high : low;
          bits |= static_cast<unsigned>((word >> 16 * (lane % 2) & 0xffffu) >= below_) << e;
        }
      }
      tile[i] = static_cast<unsigned char>(bits);
    }
  }

  uint64_t seed_ = 0, stream_ = 0;
  const int64_t* step_ = nullptr;
  int64_t first_row_ = 0, first_head_ = 0, heads_ = 0;
  unsigned below_ = 0;
  const int *rows_ = nullptr, *places_ = nullptr;  ///< null: consecutive
};

/// True if the probability of query `i` and key `j` of a tile with `Keys` keys is kept.
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
