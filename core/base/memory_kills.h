#pragma once
// The kernel's count of processes that it killed because memory ran out.

#include <cstdint>
#include <string>

namespace nrl {

/// Reads the counter of this process's control group (version 1 or 2) or, where its file cannot be read, the
/// system's.
class MemoryKills {
 public:
  /// `root` replaces "/" in tests.
  explicit MemoryKills(const std::string& root = "");
  ~MemoryKills();
  MemoryKills(const MemoryKills&) = delete;
  MemoryKills& operator=(const MemoryKills&) = delete;

  /// -1: unknown. Does not allocate.
  int64_t count() const;

 private:
  bool open(const std::string& path);

  int fd_ = -1;
};

}  // namespace nrl
