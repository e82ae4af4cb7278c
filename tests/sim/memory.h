#pragma once
// The memory of a simulated device. Not thread-safe.

#include <cstddef>
#include <deque>
#include <map>
#include <utility>
#include <vector>

namespace nrl::sim {

/// Device memory that a piece of work accesses.
struct Reach {
  struct Range {
    const void* data;
    size_t bytes;
  };
  bool all = true;            ///< any of it: a kernel's pointers are not known
  std::vector<Range> ranges;  ///< else these

  static Reach only(std::vector<Range> ranges) { return {false, std::move(ranges)}; }
};

/// Blocks with guard pages behind them, filled with NaN bytes. A released block cannot be touched.
class Heap {
 public:
  /// `guarded` blocks can be touched only between open() and close().
  explicit Heap(bool guarded) : guarded_(guarded) {}
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  /// Aligned to 256 bytes. Exit::out_of_memory when the host has no more.
  void* allocate(size_t bytes);
  /// False when `p` is no block's start.
  bool release(void* p);

  /// True when [p, p + bytes) lies in one block.
  bool contains(const void* p, size_t bytes) const;
  size_t used() const { return used_; }  ///< bytes
  size_t count() const { return blocks_.size(); }

  /// Makes memory accessible until close(); the calls nest. Protection costs time by the page, so a copy
  /// opens its own pages.
  void open(const Reach& reach = {});
  void close();

 private:
  struct Allocation {
    std::byte* map = nullptr;
    size_t mapped = 0;  ///< bytes, with the guard page
    size_t bytes = 0;
    bool guarded = false;
  };
  static void unmap(const Allocation& block);
  static void protect(const Allocation& block, bool accessible);
  void protect(const Reach::Range& range, bool accessible) const;
  const Allocation* block_of(const void* p, size_t bytes) const;

  bool guarded_;
  int opened_ = 0;
  bool all_open_ = false;
  std::vector<Reach::Range> open_ranges_;
  size_t used_ = 0;
  std::map<const std::byte*, Allocation> blocks_;  // by first byte
  std::deque<Allocation> released_;                // the longest ago first
};

}  // namespace nrl::sim
