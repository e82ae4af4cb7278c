#pragma once
// Readers of the files that core/io/record_files.h frames, written from the formats' descriptions. A damaged
// file throws std::runtime_error; an incomplete last record, as a kill leaves it, is left out.

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/io/crc32c.h"

namespace nrl::test {

inline uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

inline std::vector<std::string> tf_records(std::string_view file) {
  const auto check = [](std::string_view data, std::string_view crc) {
    const auto rotated = static_cast<uint32_t>(little_endian(crc)) - 0xa282ead8U;
    if ((rotated >> 17 | rotated << 15) != crc32c(data.data(), data.size()))
      throw std::runtime_error("a checksum of a TFRecord is wrong");
  };
  std::vector<std::string> out;
  while (file.size() >= 12) {
    check(file.substr(0, 8), file.substr(8, 4));
    const uint64_t bytes = little_endian(file.substr(0, 8));
    if (file.size() < 16 || bytes > file.size() - 16) break;
    check(file.substr(12, bytes), file.substr(12 + bytes, 4));
    out.emplace_back(file.substr(12, bytes));
    file.remove_prefix(16 + bytes);
  }
  return out;
}

// CRC-32 of IEEE 802.3, bit by bit.
inline uint32_t crc32_of(std::string_view data) {
  uint32_t crc = 0xffffffff;
  for (const char c : data) {
    crc ^= static_cast<unsigned char>(c);
    for (int i = 0; i < 8; ++i) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320U : 0);
  }
  return ~crc;
}

inline std::vector<std::string> level_log_records(std::string_view file, size_t begin) {
  constexpr size_t block = 32768, header = 7;
  std::vector<std::string> out;
  std::string record;
  bool open = false;
  for (size_t at = begin;;) {
    if (block - at % block < header) at += block - at % block;
    if (at + header > file.size()) return out;
    const uint64_t crc = little_endian(file.substr(at, 4)), bytes = little_endian(file.substr(at + 4, 2));
    const int type = static_cast<unsigned char>(file[at + 6]);
    if (at % block + header + bytes > block) throw std::runtime_error("a chunk leaves its block");
    if (at + header + bytes > file.size()) return out;
    if (crc32_of(file.substr(at + 6, 1 + bytes)) != crc)
      throw std::runtime_error("a checksum of a chunk is wrong");
    if (type < 1 || type > 4 || (type > 2) != open) throw std::runtime_error("a chunk has a wrong type");
    if (type <= 2) record.clear();
    record += file.substr(at + header, bytes);
    open = type == 2 || type == 3;
    if (!open) out.push_back(record);
    at += header + bytes;
  }
}

}  // namespace nrl::test
