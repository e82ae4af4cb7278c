#pragma once
// Pairs of bf16 as words of a packed GEMM (packed.h), which AVX512_BF16 and AMX multiply as they are.

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined operands inside its own intrinsics for uninitialized variables.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "core/ops/gemm/pack.h"

namespace nrl::ops::NRL_ISA::packed {

template <>
struct Words<bf16> {
  static constexpr int64_t per = 2;
  NRL_INLINE Lanes along(const bf16* x, int64_t elements) {
    const __mmask32 valid = elements >= 32 ? ~__mmask32{0} : (__mmask32{1} << elements) - 1;
    return reinterpret_cast<Lanes>(_mm512_maskz_loadu_epi16(valid, x));
  }
  NRL_INLINE Lanes across(const bf16* x, int64_t ld, const FirstLanes& valid, bool pair) {
    const __m256i low = valid.load_bits(x), high = pair ? valid.load_bits(x + ld) : _mm256_setzero_si256();
    // Elements of `low` and `high` (32 and on) in turn.
    const __m512i in_turn = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39,
                                             7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return reinterpret_cast<Lanes>(
        _mm512_permutex2var_epi16(_mm512_castsi256_si512(low), in_turn, _mm512_castsi256_si512(high)));
  }
#if defined(NRL_ISA_avx512_bf16)
  /// sum += a[0] b[0] + a[1] b[1].
  NRL_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
#endif
};

}  // namespace nrl::ops::NRL_ISA::packed

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
