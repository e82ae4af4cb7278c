#pragma once
// Random access to the arrays of a sample order while they are built.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "core/io/atomic_file.h"

namespace nrl::data {

/// Bytes of an order, with what is needed on disk to build it in a file.
struct OrderBytes {
  int64_t arrays = 0;  ///< of the finished order
  int64_t built =
      0;  ///< of the arrays while they are built: `arrays` and elements that are dropped at the end
  int64_t scratch = 0;  ///< of the temporary file beside them
};

/// The arrays of an order one after the other, in memory or in a file. Reads and writes of different ranges
/// are thread-safe. Does not own the memory or the file.
class OrderSpace {
 public:
  explicit OrderSpace(std::span<std::byte> memory) : memory_(memory) {}
  /// `begin`: position of the arrays in `file`. `make_scratch` opens an empty temporary file.
  OrderSpace(const File& file, uint64_t begin, std::function<File()> make_scratch)
      : file_(&file), begin_(begin), make_scratch_(std::move(make_scratch)) {}

  /// All arrays if they are built in memory; empty if in a file.
  std::span<std::byte> memory() const { return memory_; }

  /// Reads or writes values at byte `at` of the arrays. Throws Error (`io`) on errors of the file.
  template <class T>
  void read(int64_t at, std::span<T> out) const {
    read_bytes(at, std::as_writable_bytes(out));
  }
  template <class T>
  void write(int64_t at, std::span<T> values) const {
    write_bytes(at, std::as_bytes(values));
  }
  /// A temporary file that disappears when it is closed. Only for arrays in a file.
  File make_scratch() const { return make_scratch_(); }

 private:
  void read_bytes(int64_t at, std::span<std::byte> out) const;
  void write_bytes(int64_t at, std::span<const std::byte> values) const;

  std::span<std::byte> memory_;
  const File* file_ = nullptr;
  uint64_t begin_ = 0;
  std::function<File()> make_scratch_;
};

}  // namespace nrl::data
