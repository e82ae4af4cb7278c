#include "core/io/crc32c.h"

#include <array>
#include <cstring>

namespace nrl {
namespace {

constexpr uint32_t polynomial = 0x82f63b78u;

using Table = std::array<std::array<uint32_t, 256>, 8>;

// table[k][b]: the CRC register after byte b and k zero bytes, for slicing by eight.
constexpr Table make_table() {
  Table t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t c = b;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1u) != 0 ? polynomial : 0u);
    t[0][b] = c;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t b = 0; b < 256; ++b) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xffu];
  }
  return t;
}

constexpr Table crc_table = make_table();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(const void* data, size_t bytes, uint32_t crc) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t c = ~crc;
  for (; bytes >= 8; bytes -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    c = __builtin_ia32_crc32di(c, word);
  }
  auto c32 = static_cast<uint32_t>(c);
  for (; bytes > 0; --bytes, ++p) c32 = __builtin_ia32_crc32qi(c32, *p);
  return ~c32;
}
#endif

// A matrix over GF(2) as 32 columns; multiplying applies "append zero bits" to a CRC register.
using Matrix = std::array<uint32_t, 32>;

uint32_t times(const Matrix& m, uint32_t v) {
  uint32_t sum = 0;
  for (size_t i = 0; v != 0; v >>= 1, ++i) {
    if ((v & 1u) != 0) sum ^= m[i];
  }
  return sum;
}

Matrix square(const Matrix& m) {
  Matrix s;
  for (size_t i = 0; i < 32; ++i) s[i] = times(m, m[i]);
  return s;
}

}  // namespace

uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t crc) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint32_t c = ~crc;
  for (; bytes >= 8; bytes -= 8, p += 8) {
    uint32_t lo, hi;
    std::memcpy(&lo, p, 4);
    std::memcpy(&hi, p + 4, 4);
    lo ^= c;
    c = crc_table[7][lo & 0xffu] ^ crc_table[6][(lo >> 8) & 0xffu] ^ crc_table[5][(lo >> 16) & 0xffu] ^
        crc_table[4][lo >> 24] ^ crc_table[3][hi & 0xffu] ^ crc_table[2][(hi >> 8) & 0xffu] ^
        crc_table[1][(hi >> 16) & 0xffu] ^ crc_table[0][hi >> 24];
  }
  for (; bytes > 0; --bytes, ++p) c = (c >> 8) ^ crc_table[0][(c ^ *p) & 0xffu];
  return ~c;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t crc) {
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2");
  if (has_sse42) return crc32c_sse42(data, bytes, crc);
#endif
  return crc32c_portable(data, bytes, crc);
}

uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b) {
  Matrix m;  // one zero bit
  m[0] = polynomial;
  for (size_t i = 1; i < 32; ++i) m[i] = 1u << (i - 1);
  for (int i = 0; i < 3; ++i) m = square(m);  // one zero byte
  for (; bytes_b != 0; bytes_b >>= 1) {
    if ((bytes_b & 1u) != 0) crc_a = times(m, crc_a);
    if (bytes_b > 1) m = square(m);
  }
  return crc_a ^ crc_b;
}

}  // namespace nrl
