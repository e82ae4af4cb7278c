#pragma once
// Pinned host memory on loan for copies, used again once the copies are done.

#include <memory>
#include <mutex>
#include <vector>

#include "core/device/runtime.h"

namespace nrl::device {

/// Blocks by size class (powers of two from 4 KiB). Thread-safe. Nothing is given back to the system before
/// the pool goes; it must outlive its blocks, and the runtime the pool.
class PinnedPool {
  struct Entry;

 public:
  explicit PinnedPool(Runtime& runtime) : runtime_(runtime) {}
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  /// A block on loan, used by one thread at a time. When it is destroyed its memory goes back, and is on loan
  /// again only after every copy made through it is done: destroying it at once after the copy is right.
  class Block {
   public:
    Block() = default;
    ~Block();
    Block(Block&& o) noexcept : pool_(o.pool_), entry_(std::move(o.entry_)), size_(o.size_) {}
    Block& operator=(Block&& o) noexcept {
      std::swap(pool_, o.pool_);
      std::swap(entry_, o.entry_);
      std::swap(size_, o.size_);
      return *this;
    }
    /// Host code must not write below a copy_in() nor read what copy_out() fetches before wait().
    std::byte* data() const;
    size_t size() const { return size_; }

    /// Enqueues a copy of [offset, offset + bytes) to or from device memory. Not on a stream under capture.
    void copy_to(void* device, size_t offset, size_t bytes, StreamHandle stream);
    void copy_from(const void* device, size_t offset, size_t bytes, StreamHandle stream);
    /// True when every copy is done; wait() blocks until then.
    bool done() const;
    void wait() const;

   private:
    friend class PinnedPool;
    Block(PinnedPool* pool, std::unique_ptr<Entry> entry, size_t size);
    void used_in(StreamHandle stream);
    PinnedPool* pool_ = nullptr;
    std::unique_ptr<Entry> entry_;
    size_t size_ = 0;
  };

  /// A block of at least `bytes`, contents undefined. Allocates when no block of the class is free and done:
  /// not while this thread captures.
  Block take(size_t bytes);

  /// Bytes of pinned memory that the pool has allocated.
  size_t allocated() const;

 private:
  struct Entry {
    Memory memory;
    /// The last copy in each stream that used it.
    struct Use {
      StreamHandle stream;
      Event event;
    };
    std::vector<Use> uses;
    std::vector<Event> spare;
    bool done() const;
  };
  void give(std::unique_ptr<Entry> entry);

  Runtime& runtime_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Entry>> free_;  // the longest given back first
  size_t allocated_ = 0;
};

}  // namespace nrl::device
