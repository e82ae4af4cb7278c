#include "core/io/record_files.h"

#include <algorithm>
#include <cstdint>

#include <zlib.h>

#include "core/io/crc32c.h"

namespace nrl {
namespace {

enum ChunkType : uint8_t { whole = 1, first, middle, last };

uint64_t get_little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

// `chunk`: type and data.
uint32_t chunk_crc(std::string_view chunk) {
  return static_cast<uint32_t>(
      ::crc32(0, reinterpret_cast<const Bytef*>(chunk.data()), static_cast<uInt>(chunk.size())));
}

void put_little_endian(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

uint32_t masked_crc32c(std::string_view data) {
  const uint32_t crc = crc32c(data.data(), data.size());
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
}

}  // namespace

std::string tf_record(std::string_view data) {
  std::string out;
  out.reserve(data.size() + 16);
  put_little_endian(out, data.size(), 8);
  put_little_endian(out, masked_crc32c(out), 4);
  out += data;
  put_little_endian(out, masked_crc32c(data), 4);
  return out;
}

std::string LevelLogFrames::frame(std::string_view data) {
  std::string out;
  for (bool begin = true;; begin = false) {
    if (block - position_ < header) {
      out.append(block - position_, '\0');
      position_ = 0;
    }
    const size_t bytes = std::min(data.size(), block - position_ - header);
    const bool end = bytes == data.size();
    const ChunkType type = begin ? (end ? whole : first) : (end ? last : middle);
    const std::string chunk = static_cast<char>(type) + std::string(data.substr(0, bytes));
    put_little_endian(out, chunk_crc(chunk), 4);
    put_little_endian(out, bytes, 2);
    out += chunk;
    position_ = (position_ + header + bytes) % block;
    data.remove_prefix(bytes);
    if (end) return out;
  }
}

std::optional<LevelLogReader::Record> LevelLogReader::next() {
  constexpr uint64_t block = LevelLogFrames::block, header = LevelLogFrames::header;
  Record record{.offset = at_, .data = {}};
  for (bool begin = true;; begin = false) {
    if (block - at_ % block < header) at_ += block - at_ % block;
    if (begin) record.offset = at_;
    if (at_ + header > end_) return std::nullopt;
    if (block_.empty() || at_ >= block_at_ + block_.size()) {
      block_at_ = at_;
      block_.resize(std::min(end_, (at_ / block + 1) * block) - at_);
      file_.pread_all(block_.data(), block_.size(), at_);
    }
    const std::string_view rest = std::string_view(block_).substr(at_ - block_at_);
    const uint64_t bytes = get_little_endian(rest.substr(4, 2)), type = static_cast<unsigned char>(rest[6]);
    if (header + bytes > rest.size()) return std::nullopt;
    if (chunk_crc(rest.substr(6, 1 + bytes)) != get_little_endian(rest.substr(0, 4))) return std::nullopt;
    if (type < whole || type > last || begin != (type == whole || type == first)) return std::nullopt;
    record.data += rest.substr(header, bytes);
    at_ += header + bytes;
    if (type == whole || type == last) return record;
  }
}

}  // namespace nrl
