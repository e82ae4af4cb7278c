#pragma once
// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC'11). A value is a pure function of (seed, stream name, element index): any rank can generate its slice.

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace nrl {

using PhiloxBlock = std::array<uint32_t, 4>;

/// One Philox4x32-10 block. `counter` numbers the block, `key` selects the stream.
constexpr PhiloxBlock philox4x32(uint64_t counter_lo, uint64_t counter_hi, uint64_t key) {
  uint32_t c0 = static_cast<uint32_t>(counter_lo), c1 = static_cast<uint32_t>(counter_lo >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter_hi), c3 = static_cast<uint32_t>(counter_hi >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

/// Stable 64-bit hash of a name (FNV-1a): the same on every machine and in every build.
constexpr uint64_t name_hash(std::string_view name) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (char c : name) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001b3ull;
  return h;
}

/// Uniform in [0, 1) with 24 bits.
constexpr float uniform_of(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1.0p-24f;
}

/// The random stream of (seed, name); elements may be read in any order.
class PhiloxStream {
 public:
  PhiloxStream(uint64_t seed, std::string_view name) : key_(seed), hi_(name_hash(name)) {}
  PhiloxStream(uint64_t seed, uint64_t stream) : key_(seed), hi_(stream) {}

  PhiloxBlock block(uint64_t index) const { return philox4x32(index, hi_, key_); }
  uint32_t bits(uint64_t element) const { return block(element / 4)[element % 4]; }
  float uniform(uint64_t element) const { return uniform_of(bits(element)); }

  /// Standard normal elements 4 * index .. 4 * index + 3 (Box-Muller on the two pairs of a block).
  std::array<double, 4> normals(uint64_t index) const {
    const PhiloxBlock b = block(index);
    std::array<double, 4> out;
    for (size_t pair = 0; pair < 4; pair += 2) {
      const double radius = std::sqrt(-2.0 * std::log((static_cast<double>(b[pair]) + 0.5) * 0x1.0p-32));
      const double angle = 6.283185307179586 * ((static_cast<double>(b[pair + 1]) + 0.5) * 0x1.0p-32);
      out[pair] = radius * std::cos(angle);
      out[pair + 1] = radius * std::sin(angle);
    }
    return out;
  }
  double normal(uint64_t element) const { return normals(element / 4)[element % 4]; }

 private:
  uint64_t key_, hi_;
};

}  // namespace nrl
