#pragma once
// Raw host memory.

#include <cstddef>
#include <string>
#include <string_view>

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

/// Memory in bytes available to all processes of this machine together: the installed memory, or the limit of
/// the control group (container, batch job) where that is lower.
size_t machine_memory();

/// The lowest memory limit of the control groups that `membership` (the text of /proc/self/cgroup) names
/// below `root` (/sys/fs/cgroup), of version 1 or 2; SIZE_MAX without one.
size_t control_group_limit(std::string_view membership, const std::string& root);

/// Peak resident memory of this process in bytes since it was started, and the present one. The first one
/// costs about 10 us.
size_t peak_resident_bytes();
size_t resident_bytes();

}  // namespace nrl::cpu
