#include "core/io/file_identity.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/crc32c.h"

namespace nrl {
namespace {

constexpr uint64_t sample_count = 64, sample_bytes = uint64_t{64} << 10;

uint32_t crc_of_block(const File& file, uint64_t begin, uint64_t bytes, std::string& buffer, uint32_t crc) {
  file.pread_all(buffer.data(), bytes, begin);
  return crc32c(buffer.data(), bytes, crc);
}

}  // namespace

std::string FileIdentity::text() const {
  return fmt::format("{} bytes, CRC-32C {:08x}", bytes, crc32c);
}

FileIdentity identify_file(const std::string& path) {
  const File file = File::open_read(path);
  FileIdentity id{file.size(), 0};
  std::string buffer(std::min<uint64_t>(id.bytes, uint64_t{4} << 20), '\0');
  for (uint64_t at = 0; at < id.bytes; at += buffer.size())
    id.crc32c = crc_of_block(file, at, std::min<uint64_t>(buffer.size(), id.bytes - at), buffer, id.crc32c);
  return id;
}

void each_sample(uint64_t bytes, uint64_t block,
                 const std::function<void(uint64_t begin, uint64_t bytes)>& use) {
  if (bytes <= sample_count * block) return use(0, bytes);
  const uint64_t last = bytes - block;
  // last / (sample_count - 1) * i in two parts, so that no product overflows.
  for (uint64_t i = 0; i < sample_count; ++i)
    use(last / (sample_count - 1) * i + last % (sample_count - 1) * i / (sample_count - 1), block);
}

FileIdentity identify_file_by_samples(const std::string& path) {
  const File file = File::open_read(path);
  FileIdentity id{file.size(), 0};
  if (id.bytes <= sample_count * sample_bytes) return identify_file(path);
  std::string buffer(sample_bytes, '\0');
  each_sample(id.bytes, sample_bytes, [&](uint64_t begin, uint64_t bytes) {
    id.crc32c = crc_of_block(file, begin, bytes, buffer, id.crc32c);
  });
  return id;
}

}  // namespace nrl
