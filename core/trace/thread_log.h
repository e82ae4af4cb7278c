#pragma once
// The log of ranges of one thread. Only that thread writes it, without a lock; reports read it at any time.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/trace/recording.h"

namespace nrl::trace::detail {

/// Nanoseconds of the steady clock.
int64_t now_ns();

/// A range of a thread that has not ended.
struct OpenRange {
  const char* name;
  int64_t begin = 0;  ///< 0: opened without recording
  Tag tag;
  uint32_t call = no_call;
  Kind kind = Kind::other;
};

/// Space for the events of a window, allocated and touched before it begins. Threads take chunks of it.
class EventSpace {
 public:
  struct Chunk {
    static constexpr uint32_t capacity = 1024;
    std::array<Event, capacity> events;
    std::atomic<uint32_t> used = 0;
  };

  explicit EventSpace(size_t events) : chunks_((events + Chunk::capacity - 1) / Chunk::capacity) {}
  /// A chunk for one thread; null when all are taken.
  Chunk* take() {
    const size_t i = taken_.fetch_add(1, std::memory_order_relaxed);
    return i < chunks_.size() ? &chunks_[i] : nullptr;
  }
  void drop() { dropped_.fetch_add(1, std::memory_order_relaxed); }
  int64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }
  /// Adds all events. No thread may write any more.
  void read(std::vector<Event>& out) const;

 private:
  std::vector<Chunk> chunks_;
  std::atomic<size_t> taken_ = 0;
  std::atomic<int64_t> dropped_ = 0;
};

/// The totals of one thread by the pointer of the name: a hash table with linear probing that its thread
/// alone changes. A count may be read between the two stores of add(), a report does not mind.
class ThreadTotals {
 public:
  ThreadTotals() { grow(); }
  /// Counts a range of the recording `generation`; older counts are forgotten.
  void add(const char* name, int64_t ns, uint32_t generation);
  using Sums = std::unordered_map<std::string_view, Total>;
  /// Callable from any thread.
  void read(uint32_t generation, Sums& sums) const;

 private:
  struct Slot {
    std::atomic<const char*> name = nullptr;
    std::atomic<uint32_t> generation = 0;
    std::atomic<int64_t> count = 0, ns = 0;
  };
  struct Table {
    explicit Table(size_t size) : slots(size) {}
    std::vector<Slot> slots;  ///< their number is a power of two
    size_t used = 0;
  };
  static Slot& find(Table& table, const char* name);
  void grow();

  std::atomic<Table*> table_ = nullptr;
  std::vector<std::unique_ptr<Table>> tables_;  // the old ones too: a report may still read them
};

struct ThreadLog {
  ThreadTotals totals;
  std::vector<OpenRange> open;  ///< the innermost last
  Tag tag;
  uint16_t row = 0;
  std::string name;                    ///< of the row; empty: by number
  bool in_use = true;                  ///< by a thread
  std::atomic<bool> writing = false;   ///< an event
  EventSpace::Chunk* chunk = nullptr;  ///< of the window `window`
  uint32_t window = 0;

  void add(const Event& event);
};

/// The log of the calling thread, made at its first call. A thread that ends leaves its log to a later one.
inline thread_local constinit ThreadLog* own_log = nullptr;
ThreadLog& make_log();
inline ThreadLog& thread_log() {
  return own_log ? *own_log : make_log();
}

/// The space of the window that is open; null: none. `window` counts windows, 0: none is open.
extern std::atomic<EventSpace*> event_space;
extern std::atomic<uint32_t> window;

}  // namespace nrl::trace::detail
