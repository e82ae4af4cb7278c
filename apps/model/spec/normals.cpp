#include "apps/model/spec/normals.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace nrl::model {
namespace {

// Logarithm, sine and cosine without branches, so that the compiler vectorizes them. Their relative errors
// stay below 2^-49, but they round otherwise than the C library's. A value is used only if all numbers within
// `margin` of it are the same float; else the C library computes it again. So all instruction sets give the
// same floats, with fused multiply-adds or without.
constexpr double margin = 0x1p-46;

constexpr int64_t batch = 64;  // blocks: all intermediate values stay in the first-level cache

// Adding it to an integral double leaves the integer in the low bits.
constexpr int64_t shifter_bits = 0x4338000000000000;  // 1.5 * 2^52
constexpr double shifter = std::bit_cast<double>(shifter_bits);

// Natural logarithm of u in (0, 1).
[[gnu::always_inline]] inline double logarithm(double u) {
  // u = 2^k * m with m in [sqrt(1/2), sqrt(2)); log(m) = 2 artanh(s) by its series.
  const auto bits = std::bit_cast<int64_t>(u);
  const int64_t k = (bits - 0x3FE6A09E667F3BCD) >> 52;
  const double f = std::bit_cast<double>(bits - (k << 52)) - 1;
  const double s = f / (2 + f), z = s * s;
  double p = 2.0 / 21;
  p = p * z + 2.0 / 19;
  p = p * z + 2.0 / 17;
  p = p * z + 2.0 / 15;
  p = p * z + 2.0 / 13;
  p = p * z + 2.0 / 11;
  p = p * z + 2.0 / 9;
  p = p * z + 2.0 / 7;
  p = p * z + 2.0 / 5;
  p = p * z + 2.0 / 3;
  const double exponent = std::bit_cast<double>(shifter_bits + k) - shifter;
  return exponent * 0.6931471805599453 + (2 * s + s * z * p);
}

// Sine and cosine of an angle in [0, 2 pi].
[[gnu::always_inline]] inline void sine_cosine(double angle, double& sine, double& cosine) {
  // angle = quarters * pi/2 + r; pi/2 is split into two constants, the first with 33 bits.
  const double shifted = angle * 0.6366197723675814 + shifter;
  const auto quarters = std::bit_cast<int64_t>(shifted);
  const double count = shifted - shifter;
  const double r = (angle - count * 1.57079632673412561417) - count * 6.07710050650619224932e-11;
  const double z = r * r;
  double p = -1 / 1307674368000.0;  // Taylor series, to 1 / 15! and 1 / 16!
  p = p * z + 1 / 6227020800.0;
  p = p * z - 1 / 39916800.0;
  p = p * z + 1 / 362880.0;
  p = p * z - 1 / 5040.0;
  p = p * z + 1 / 120.0;
  p = p * z - 1 / 6.0;
  const auto s = std::bit_cast<int64_t>(r + r * z * p);
  p = 1 / 20922789888000.0;
  p = p * z - 1 / 87178291200.0;
  p = p * z + 1 / 479001600.0;
  p = p * z - 1 / 3628800.0;
  p = p * z + 1 / 40320.0;
  p = p * z - 1 / 720.0;
  p = p * z + 1 / 24.0;
  const auto c = std::bit_cast<int64_t>(1 - 0.5 * z + z * z * p);
  // An odd number of quarters exchanges them; the sign is bit 1 of the quarters, one quarter later for the
  // cosine.
  const int64_t odd = -(quarters & 1);
  sine = std::bit_cast<double>(((s & ~odd) | (c & odd)) ^ (quarters & 2) << 62);
  cosine = std::bit_cast<double>(((c & ~odd) | (s & odd)) ^ ((quarters + 1) & 2) << 62);
}

// PhiloxStream::normals() for `batch` pairs.
[[gnu::always_inline]] inline void pairs(const uint32_t* a, const uint32_t* b, double scale, double* first,
                                         double* second) {
  for (int64_t i = 0; i < batch; ++i) {
    const double radius = std::sqrt(-2.0 * logarithm((static_cast<double>(a[i]) + 0.5) * 0x1.0p-32));
    const double angle = 6.283185307179586 * ((static_cast<double>(b[i]) + 0.5) * 0x1.0p-32);
    double sine = 0, cosine = 0;
    sine_cosine(angle, sine, cosine);
    first[i] = scale * (radius * cosine);
    second[i] = scale * (radius * sine);
  }
}

void exact(const PhiloxStream& stream, uint64_t first, int64_t blocks, double scale, float* out) {
  for (int64_t i = 0; i < blocks; ++i)
    for (const double value : stream.normals(first + static_cast<uint64_t>(i)))
      *out++ = static_cast<float>(scale * value);
}

// False if a value is too close to the boundary between two floats.
[[gnu::always_inline]] inline bool fast(const PhiloxStream& stream, uint64_t first, double scale,
                                        float* out) {
  uint32_t words[4][batch];
  double values[4][batch];
  for (int64_t i = 0; i < batch; ++i) {
    const PhiloxBlock block = stream.block(first + static_cast<uint64_t>(i));
    for (size_t k = 0; k < 4; ++k) words[k][i] = block[k];
  }
  pairs(words[0], words[1], scale, values[0], values[1]);
  pairs(words[2], words[3], scale, values[2], values[3]);
  int unsure = 0;
  for (int64_t i = 0; i < batch; ++i)
    for (size_t k = 0; k < 4; ++k) {
      const auto value = static_cast<float>(values[k][i] * (1 + margin));
      unsure |= static_cast<int>(value != static_cast<float>(values[k][i] * (1 - margin)));
      out[4 * i + static_cast<int64_t>(k)] = value;
    }
  return unsure == 0;
}

using Fast = bool (*)(const PhiloxStream& stream, uint64_t first, double scale, float* out);

bool fast_baseline(const PhiloxStream& stream, uint64_t first, double scale, float* out) {
  return fast(stream, first, scale, out);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) bool fast_avx2(const PhiloxStream& stream, uint64_t first, double scale,
                                                   float* out) {
  return fast(stream, first, scale, out);
}

__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))) bool fast_avx512(
    const PhiloxStream& stream, uint64_t first, double scale, float* out) {
  return fast(stream, first, scale, out);
}

Fast fast_for(Isa isa) {
  if (isa >= Isa::avx512) return fast_avx512;
  return isa >= Isa::avx2 ? fast_avx2 : fast_baseline;
}
#else
Fast fast_for(Isa) {
  return fast_baseline;
}
#endif

}  // namespace

void scaled_normals(const PhiloxStream& stream, uint64_t first, int64_t blocks, double scale, float* out,
                    Isa isa) {
  const Fast of_batch = fast_for(isa);
  for (; blocks >= batch; blocks -= batch, first += batch, out += 4 * batch)
    if (!of_batch(stream, first, scale, out)) exact(stream, first, batch, scale, out);
  exact(stream, first, blocks, scale, out);
}

}  // namespace nrl::model
