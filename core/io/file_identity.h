#pragma once
// Detects whether a file has changed, without reading all of a large one.

#include <cstdint>
#include <functional>
#include <string>

namespace nrl {

/// Size and CRC-32C of a file.
struct FileIdentity {
  uint64_t bytes = 0;
  uint32_t crc32c = 0;

  /// "1234 bytes, CRC-32C 1a2b3c4d".
  std::string text() const;
  bool operator==(const FileIdentity&) const = default;
};

/// The checksum covers every byte. Exit::no_input when the file cannot be opened, Exit::io when
/// it cannot be read.
FileIdentity identify_file(const std::string& path);

/// Calls `use` for 64 blocks of `block` bytes at equal distances, including the first and the last of `bytes`
/// bytes, or once for all of them if there are no more than the blocks have.
void each_sample(uint64_t bytes, uint64_t block,
                 const std::function<void(uint64_t begin, uint64_t bytes)>& use);

/// The checksum covers 64 blocks of 64 KiB at equal distances, including the first and the last, or the whole
/// file up to 4 MiB. A change elsewhere that keeps the size is not detected.
FileIdentity identify_file_by_samples(const std::string& path);

}  // namespace nrl
