#pragma once
// Access to memory that the host cannot read or write, such as a GPU's, in pieces through staging buffers.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/error.h"

namespace nrl {

/// A contiguous part of such memory.
struct MemoryRange {
  const void* data = nullptr;
  size_t bytes = 0;
};

/// Double-buffered: the transfer of one piece overlaps with the caller's work on another. One thread at a
/// time; reading and writing must not be mixed before finish().
class Staging {
 public:
  virtual ~Staging() = default;

  /// Largest size of a piece.
  virtual size_t piece_bytes() const = 0;

  /// Reads `ranges`, each at most piece_bytes(), in this order by next(). Ranges of an earlier call that were
  /// not read yet are forgotten.
  virtual void read_ahead(std::vector<MemoryRange> ranges) = 0;
  /// The next range in host memory; valid until the following call. The transfer of the range after it
  /// starts.
  virtual const void* next() = 0;

  /// A buffer of piece_bytes() to be filled for write().
  virtual void* buffer() = 0;
  /// Starts the transfer of the first `bytes` of the last buffer() to `to`.
  virtual void write(void* to, size_t bytes) = 0;

  /// Waits until all writes are done.
  virtual void finish() = 0;
};

/// Appends a range of any size in pieces that `staging` can transfer.
inline void append_pieces(const Staging& staging, const void* data, size_t bytes,
                          std::vector<MemoryRange>& out) {
  const size_t piece = staging.piece_bytes();
  for (size_t at = 0; at < bytes; at += piece)
    out.push_back({static_cast<const char*>(data) + at, bytes - at < piece ? bytes - at : piece});
}

/// Writes `count` units of `unit` bytes to `data`: fill(first, n, out) supplies units [first, first + n) in
/// host memory. `staging` null: `data` is host memory, and all units are filled in one call.
template <class Fill>
void fill_memory(Staging* staging, void* data, int64_t count, int64_t unit, const Fill& fill) {
  if (!staging) {
    fill(int64_t{0}, count, data);
    return;
  }
  const int64_t most = static_cast<int64_t>(staging->piece_bytes()) / unit;
  NRL_CHECK(most > 0, "units of {} bytes, pieces of {}", unit, staging->piece_bytes());
  for (int64_t first = 0; first < count; first += most) {
    const int64_t n = std::min(most, count - first);
    void* const buffer = staging->buffer();
    fill(first, n, buffer);
    staging->write(static_cast<char*>(data) + first * unit, static_cast<size_t>(n * unit));
  }
}

}  // namespace nrl
