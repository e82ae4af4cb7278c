#pragma once
// Raw host memory.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace nrl::cpu {

/// Anonymous, zeroed, page-aligned memory; pages become resident when first touched. Large blocks ask for
/// huge pages. Move-only owner; fails with exit code 71 when the system refuses.
class HostMemory {
 public:
  HostMemory() = default;
  /// Without `reserved` of any size: for addresses of which few are written.
  explicit HostMemory(size_t bytes, bool reserved = true);
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

/// Memory in bytes available to all processes of this machine together: the installed memory, or the limit of
/// the control group (container, batch job) where that is lower.
size_t machine_memory();

/// Bytes that this process could still get: what is available on the machine, or what the limits of the
/// process (ulimit -d and -v) leave where that is less.
size_t obtainable_memory();

/// The lowest memory limit of the control groups that `membership` (the text of /proc/self/cgroup) names
/// below `root` (/sys/fs/cgroup), of version 1 or 2; SIZE_MAX without one.
size_t control_group_limit(std::string_view membership, const std::string& root);

/// Peak resident memory of this process in bytes since it was started, and the present one. The first one
/// costs about 10 us.
size_t peak_resident_bytes();
size_t resident_bytes();

/// Resident memory of this process by kind, and bytes of malloc's heap, which is a part of the anonymous
/// memory.
struct ResidentMemory {
  int64_t anonymous = 0, files = 0, shared = 0;
  int64_t heap_used = 0, heap_free = 0;
};
/// Costs about 50 us.
ResidentMemory resident_memory();

/// Makes the size of malloc's heap follow from what is allocated, not from the order in which it is freed.
/// Libraries allocate and free packed operands of many sizes in every step, which glibc places badly: small
/// allocations take the ends of a freed block, which is then too small for the same request. Fixes the sizes
/// from which memory is mapped and returned at the largest values that they would reach by themselves, and
/// reserves a free block for small allocations, whose pages are used as needed. Call when a program starts,
/// and again when most of what lives long is allocated.
void arrange_heap();

/// Gives pages of the heap that hold no allocation back to the system. Takes about 1 ms.
void release_free_heap();

}  // namespace nrl::cpu
