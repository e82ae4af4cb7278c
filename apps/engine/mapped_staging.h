#pragma once
// Reads and writes memory that is partly a mapped file, and keeps no more of the file resident than needed.

#include <span>
#include <vector>

#include "core/io/staging.h"
#include "memory/plan.h"

namespace nrl::engine {

/// Copies nothing that is read. Pages of memory::Tier::host leave the memory of the process after use.
class MappedStaging final : public Staging {
 public:
  /// The arenas must outlive this object.
  explicit MappedStaging(const memory::Arenas& arenas) : arenas_(arenas) {}
  ~MappedStaging() override { evict(); }

  static constexpr size_t size = size_t{8} << 20;
  size_t piece_bytes() const override { return size; }
  void read_ahead(std::vector<MemoryRange> ranges) override;
  const void* next() override;
  void* buffer() override;
  void write(void* to, size_t bytes) override;
  void finish() override { evict(); }

 private:
  bool in_file(const void* p) const;
  void evict();

  const memory::Arenas& arenas_;
  std::vector<MemoryRange> ranges_;  // to be read
  size_t read_ = 0;
  std::vector<std::byte> buffer_;
};

}  // namespace nrl::engine
