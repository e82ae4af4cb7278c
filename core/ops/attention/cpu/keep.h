#pragma once
// The mask of attention dropout (attention_dropout.h) on the CPU, for a vector of queries at a time:
// scores are stored [key][query] with queries in lanes, and so are the Philox blocks. Compiled once
// per instruction set.

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "core/ops/attention.h"
#include "core/ops/attention/cpu/micro.h"
#include "core/ops/shared/attention_dropout.h"

namespace nrl::ops::NRL_ISA {

class KeepMask {
 public:
  /// `a`: AttentionForward or AttentionBackward.
  template <class Arguments>
  explicit KeepMask(const Arguments& a)
      : scale(attention::keep_scale(a.dropout.p)),
        seed_(a.dropout.seed),
        stream_(dropout_stream(a.dropout.stream, static_cast<const int64_t*>(a.dropout.step.data))),
        first_row_(a.dropout.first_row),
        first_head_(a.slice.first),
        heads_(a.slice.all > 0 ? a.slice.all : a.q.dim(1)),
        below_(static_cast<int32_t>(attention::drop_below(a.dropout.p))),
        rows_(static_cast<const int32_t*>(a.dropout.rows.data)),
        places_(static_cast<const int32_t*>(a.key_places.data)),
        queries_(a.q.dim(0)) {}

  float scale;  ///< of the kept probabilities
  bool drops() const { return below_ > 0; }

  /// Calls body(j, keep) for the keys [keys.begin, keys.end) of a block that begins at key `key` of the
  /// sequence, a multiple of 8, in row `key_row` of k. Lane l of `keep` has all bits set when the probability
  /// of query `row` + l and of this key stays.
  template <class Body>
  NRL_ALWAYS void for_keys(int64_t row, int64_t head, int64_t key, int64_t key_row, const micro::Range& keys,
                           const Body& body) const {
    if (places_) return for_placed_keys(row, head, key_row, keys, body);
    constexpr int width = attention::keys_per_block;
    const uint64_t first =
        attention::philox_block_of(first_row_ + row, heads_, first_head_ + head, key / width);
    const uint64_t lane = static_cast<uint64_t>(heads_) << attention::key_block_bits;
    const micro::IntVec below = micro::splat_int(below_);
    WideVec even;
    for (int l = 0; l < lanes / 2; ++l) even[l] = first + 2 * static_cast<uint64_t>(l) * lane;
    for (int64_t j = keys.begin / width * width; j < keys.end; j += width) {
      const WideVec counter = even + static_cast<uint64_t>(j / width);
      micro::UintVec words[4];
      philox(counter, counter + lane, words);
      const auto one = [&](int e) __attribute__((always_inline)) {
        const micro::UintVec bits = e % 2 ? words[e / 2] >> 16 : words[e / 2] & 0xffffu;
        body(j + e, reinterpret_cast<micro::IntVec>(bits) >= below);
      };
      if (j >= keys.begin && j + width <= keys.end) {
#pragma GCC unroll 8
        for (int e = 0; e < width; ++e) one(e);
      } else {
        for (int e = 0; e < width; ++e)
          if (j + e >= keys.begin && j + e < keys.end) one(e);
      }
    }
  }

  /// Clears what is dropped of the probabilities p[j * step ...] of those keys and a vector of queries.
  void drop_block(int64_t row, int64_t head, int64_t key, int64_t key_row, const micro::Range& keys, float* p,
                  int64_t step) const {
    for_keys(
        row, head, key, key_row, keys, [&](int64_t j, micro::IntVec keep) __attribute__((always_inline)) {
          float* at = p + j * step;
          micro::store(at, micro::select(keep, micro::load(at), micro::Vec{}));
        });
  }

 private:
  /// 64-bit elements of the even or of the odd lanes: half as many as there are lanes.
  typedef uint64_t WideVec __attribute__((vector_size(lanes * 4), may_alias));

  /// for_keys() with the rows and places of a table. Neighbors mostly share a Philox block here, too.
  template <class Body>
  NRL_ALWAYS void for_placed_keys(int64_t row, int64_t head, int64_t key_row, const micro::Range& keys,
                                  const Body& body) const {
    constexpr int width = attention::keys_per_block;
    const micro::IntVec below = micro::splat_int(below_);
    WideVec even, odd;
    const auto first_of = [&](int64_t lane) {  // lanes past the last query are not used
      const int64_t at = std::min(row + lane, queries_ - 1);
      return attention::philox_block_of(first_row_ + rows_[at], heads_, first_head_ + head, 0);
    };
    for (int l = 0; l < lanes / 2; ++l) even[l] = first_of(2 * l), odd[l] = first_of(2 * l + 1);
    micro::UintVec words[4] = {};
    int64_t drawn = -1;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const int64_t place = places_[key_row + j], e = place % width;
      if (place / width != drawn) {
        drawn = place / width;
        philox(even + static_cast<uint64_t>(drawn), odd + static_cast<uint64_t>(drawn), words);
      }
      const micro::UintVec bits = e % 2 ? words[e / 2] >> 16 : words[e / 2] & 0xffffu;
      body(j, reinterpret_cast<micro::IntVec>(bits) >= below);
    }
  }

  /// The low halves of the elements times m, in 64 bits.
  NRL_ALWAYS static WideVec multiply_low(WideVec a, uint32_t m) {
    const WideVec factor = uint64_t{m} - WideVec{};
#if defined(NRL_ISA_avx512)
    return reinterpret_cast<WideVec>(
        _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(factor)));
#elif defined(NRL_ISA_avx2)
    return reinterpret_cast<WideVec>(
        _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(factor)));
#elif defined(__SSE2__)
    return reinterpret_cast<WideVec>(
        _mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(factor)));
#else
    return (a & 0xffffffffull) * factor;
#endif
  }

  /// philox4x32 (core/base/philox.h) of the counters of the even and of the odd lanes, word by word. Only the
  /// low halves of c0 to c3 are significant; the multiplication ignores the upper halves, which are cleared
  /// at the end.
  NRL_ALWAYS void philox(WideVec even, WideVec odd, micro::UintVec (&words)[4]) const {
    WideVec c[2][4];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      c[half][0] = half ? odd : even;
      c[half][1] = c[half][0] >> 32;
      c[half][2] = stream_ - WideVec{};
      c[half][3] = c[half][2] >> 32;
    }
    uint32_t k0 = static_cast<uint32_t>(seed_), k1 = static_cast<uint32_t>(seed_ >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
      for (WideVec(&x)[4] : c) {
        const WideVec p0 = multiply_low(x[0], 0xD2511F53u), p1 = multiply_low(x[2], 0xCD9E8D57u);
        x[0] = (p1 >> 32) ^ x[1] ^ k0;
        x[2] = (p0 >> 32) ^ x[3] ^ k1;
        x[1] = p1;
        x[3] = p0;
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w)
      words[w] = reinterpret_cast<micro::UintVec>((c[0][w] & 0xffffffffull) | c[1][w] << 32);
  }

  uint64_t seed_, stream_;
  int64_t first_row_, first_head_, heads_;
  int32_t below_;
  const int32_t *rows_, *places_;  ///< null: consecutive
  int64_t queries_;
};

}  // namespace nrl::ops::NRL_ISA
