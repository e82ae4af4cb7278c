#pragma once
// A cache of the token ids of short pieces of text. Words repeat, and a hit costs one cache line.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

namespace nrl::data {

/// Direct-mapped; not thread-safe.
class PieceCache {
 public:
  static constexpr size_t max_bytes = 32, max_ids = 7;

  struct alignas(64) Entry {
    std::array<uint64_t, 4> words{};  // determine a piece together with its length
    std::array<int32_t, max_ids> ids;
    uint8_t bytes = 0, count = 0;  // 0 bytes: empty

    /// True if the entry holds the piece of `key`.
    bool holds(const Entry& key) const {
      uint64_t different = bytes ^ key.bytes;
      for (size_t i = 0; i < words.size(); ++i) different |= words[i] ^ key.words[i];
      return different == 0;
    }
  };

  /// The entry of a piece of 1 to max_bytes bytes, without ids.
  static Entry key(std::string_view piece) {
    Entry key;
    const char* p = piece.data();
    const size_t n = piece.size();
    key.bytes = static_cast<uint8_t>(n);
    // Overlapping loads of fixed size cover the piece.
    if (n >= 16) {
      key.words = {load<uint64_t>(p), load<uint64_t>(p + 8), load<uint64_t>(p + n - 16),
                   load<uint64_t>(p + n - 8)};
    } else if (n >= 8) {
      key.words[0] = load<uint64_t>(p);
      key.words[1] = load<uint64_t>(p + n - 8);
    } else if (n >= 4) {
      key.words[0] = uint64_t{load<uint32_t>(p)} << 32 | load<uint32_t>(p + n - 4);
    } else {
      const auto byte = [&](size_t i) { return uint64_t{static_cast<uint8_t>(p[i])}; };
      key.words[0] = byte(0) << 16 | byte(n / 2) << 8 | byte(n - 1);
    }
    return key;
  }

  /// The only entry that may hold the piece of `key`.
  Entry& slot(const Entry& key) {
    const auto& w = key.words;
    uint64_t h = (w[0] ^ w[2] * 0x9FB21C651E98DF25ull) * 0x9E3779B97F4A7C15ull;
    h ^= (w[1] ^ w[3] * 0xC2B2AE3D27D4EB4Full ^ key.bytes) * 0xD6E8FEB86659FD93ull;
    h *= 0xBF58476D1CE4E5B9ull;
    return entries_[h >> (64 - log2_entries)];
  }

 private:
  template <class T>
  static T load(const char* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }

  static constexpr int log2_entries = 16;  // 4 MiB
  std::vector<Entry> entries_{size_t{1} << log2_entries};
};

}  // namespace nrl::data
