#pragma once
// The shared memory of one running block; internal to the engine.

#include <cstddef>
#include <string>
#include <vector>

namespace nrl::sim {

/// Whole pages with an inaccessible one below.
std::byte* map_pages(size_t bytes);
void unmap_pages(std::byte* p, size_t bytes);

/// Dynamic memory, then the static arrays in the order in which the block meets them. Everything starts as
/// NaN (0xff bytes), and under the address sanitizer nothing else can be accessed.
class SharedMemory {
 public:
  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// For a new block.
  void reset(size_t dynamic_bytes);
  std::byte* dynamic() const { return memory_; }
  /// The array declared at `key`; null, with `reason` set, when it does not fit.
  std::byte* array(const void* key, size_t bytes, size_t align, std::string& reason);
  bool contains(const void* p, size_t bytes) const;

 private:
  struct Array {
    const void* key;
    std::byte* data;
  };
  std::byte* memory_;
  size_t dynamic_bytes_ = 0;
  size_t static_bytes_ = 0;  ///< as the GPU counts them
  size_t top_ = 0;           ///< of the static arrays with their guards
  std::vector<Array> arrays_;
};

}  // namespace nrl::sim
