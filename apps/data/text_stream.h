#pragma once
// Reads a file as a stream of bytes, decompressing on the fly.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace nrl::data {

enum class Compression { none, gzip, zstd };

/// The compression by the file name: `.gz`, `.zst`.
Compression compression_of(const std::string& path);

/// Reads a file sequentially in constant memory. Concatenated gzip members or zstd frames are one
/// text. Not thread-safe.
class TextStream {
 public:
  /// Throws Error (`no_input`).
  TextStream(const std::string& path, Compression compression);
  ~TextStream();
  TextStream(const TextStream&) = delete;
  TextStream& operator=(const TextStream&) = delete;

  /// Reads up to `bytes` bytes of text; fewer only at the end of the file, then 0. Throws Error: `io`, `data`
  /// (not compressed data, damaged, or truncated; the message names file and byte).
  size_t read(char* to, size_t bytes);

  /// Size of the file on disk, and the bytes read from it so far.
  int64_t file_bytes() const;
  int64_t file_position() const;

  /// Implementation detail.
  struct Source;

 private:
  std::unique_ptr<Source> source_;
};

}  // namespace nrl::data
