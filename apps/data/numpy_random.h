#pragma once
// The random numbers of numpy that Megatron-LM's data order is made of.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace nrl::data {

/// The Mersenne twister, seeded as numpy and std::mt19937 do it. Computes 624 numbers at a time in loops that
/// compilers vectorize, which takes half the time of std::mt19937, whose words have 64 bits.
class MersenneTwister {
 public:
  explicit MersenneTwister(uint32_t seed) {
    state_[0] = seed;
    for (uint32_t i = 1; i < size; ++i) state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
  }

  uint32_t operator()() {
    if (next_ == size) refill();
    return numbers_[next_++];
  }

 private:
  static constexpr size_t size = 624, shift = 397;

  static uint32_t twist(uint32_t a, uint32_t b) {
    return ((a & 0x80000000u) | (b & 0x7fffffffu)) >> 1 ^ (-(b & 1u) & 0x9908b0dfu);
  }
  void refill() {
    for (size_t i = 0; i < size - shift; ++i) state_[i] = state_[i + shift] ^ twist(state_[i], state_[i + 1]);
    for (size_t i = size - shift; i < size - 1; ++i)
      state_[i] = state_[i + shift - size] ^ twist(state_[i], state_[i + 1]);
    state_[size - 1] = state_[shift - 1] ^ twist(state_[size - 1], state_[0]);
    for (size_t i = 0; i < size; ++i) {
      uint32_t y = state_[i];
      y ^= y >> 11;
      y ^= y << 7 & 0x9d2c5680u;
      y ^= y << 15 & 0xefc60000u;
      numbers_[i] = y ^ y >> 18;
    }
    next_ = 0;
  }

  std::array<uint32_t, size> state_, numbers_;
  size_t next_ = size;
};

/// The parts of `numpy.random.RandomState` that Megatron-LM uses: seeding with a 32-bit number, and
/// `shuffle`.
class NumpyRandomState {
 public:
  explicit NumpyRandomState(uint32_t seed) : engine_(seed) {}

  /// Draws the partners of elements last, last - 1, ... of numpy's legacy Fisher-Yates shuffle from the end,
  /// by masking and rejection: partners[k] <= last - k. Calls `use` with every candidate, bounded by last -
  /// k. partners.size() <= last < 2^32.
  template <class Use>
  void draw(uint64_t last, std::span<uint32_t> partners, const Use& use) {
    for (size_t k = 0; k < partners.size();) {
      const auto bound = static_cast<uint32_t>(last - k);
      const uint32_t value = engine_() & (UINT32_MAX >> std::countl_zero(bound));
      partners[k] = value;
      use(std::min(value, bound));
      k += value <= bound;
    }
  }

  /// Shuffles at most 2^32 values.
  template <class T>
  void shuffle(std::span<T> values) {
    // Partners do not depend on the values, so they are drawn in batches to overlap the cache misses.
    std::array<uint32_t, 64> partners;
    for (uint64_t last = values.size(); last-- > 1;) {
      const std::span batch(partners.data(), std::min<uint64_t>(partners.size(), last));
      draw(last, batch, [&](uint32_t partner) { __builtin_prefetch(values.data() + partner, 1); });
      for (uint64_t k = 0; k < batch.size(); ++k) std::swap(values[last - k], values[batch[k]]);
      last -= batch.size() - 1;
    }
  }

 private:
  MersenneTwister engine_;
};

}  // namespace nrl::data
