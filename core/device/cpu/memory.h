#pragma once
// Raw host memory.

#include <cstddef>

namespace nrl::cpu {

/// Anonymous, zeroed, page-aligned memory; pages become resident when first touched. Large blocks ask for
/// huge pages. Move-only owner; fails with exit code 71 when the system refuses.
class HostMemory {
 public:
  HostMemory() = default;
  explicit HostMemory(size_t bytes);
  ~HostMemory();
  HostMemory(HostMemory&& other) noexcept;
  HostMemory& operator=(HostMemory&& other) noexcept;

  /// Gives the pages behind the first `bytes` (at most size()) back to the system.
  void shrink(size_t bytes);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// Peak resident memory of this process in bytes (getrusage), and the present one.
size_t peak_resident_bytes();
size_t resident_bytes();

}  // namespace nrl::cpu
