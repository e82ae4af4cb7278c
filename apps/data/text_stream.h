#pragma once
// A file as a stream of bytes, decompressed while it is read.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace nrl::data {

enum class Compression { none, gzip, zstd };

/// By the name: `.gz`, `.zst`.
Compression compression_of(const std::string& path);

/// Reads from the beginning to the end in constant memory. Several gzip members or zstd frames behind each
/// other are one text. Not thread-safe.
class TextStream {
 public:
  /// Throws Error (`no_input`).
  TextStream(const std::string& path, Compression compression);
  ~TextStream();
  TextStream(const TextStream&) = delete;
  TextStream& operator=(const TextStream&) = delete;

  /// Up to `bytes` bytes of text; fewer only at the end of the file, then 0. Throws Error: `io`, `data` (not
  /// compressed data, damaged, or cut; the message names the file and the byte in it).
  size_t read(char* to, size_t bytes);

  /// Bytes on disk: of the file, and those read so far.
  int64_t file_bytes() const;
  int64_t file_position() const;

  /// The steps of a format; an implementation detail.
  struct Source;

 private:
  std::unique_ptr<Source> source_;
};

}  // namespace nrl::data
