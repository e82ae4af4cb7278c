#include "core/trace/thread_log.h"

#include <bit>
#include <chrono>

namespace nrl::trace::detail {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void EventSpace::read(std::vector<Event>& out) const {
  for (const Chunk& chunk : chunks_) {
    const uint32_t used = chunk.used.load(std::memory_order_acquire);
    out.insert(out.end(), chunk.events.begin(), chunk.events.begin() + used);
  }
}

ThreadTotals::Slot& ThreadTotals::find(Table& table, const char* name) {
  const size_t mask = table.slots.size() - 1;
  // Multiplicative hashing: pointers to literals differ in their low bits.
  const uint64_t hash = std::bit_cast<uintptr_t>(name) * 0x9E3779B97F4A7C15u;
  for (size_t i = (hash >> 32) & mask;; i = (i + 1) & mask) {
    const char* at = table.slots[i].name.load(std::memory_order_relaxed);
    if (at == name || !at) return table.slots[i];
  }
}

void ThreadTotals::grow() {
  Table* old = table_.load(std::memory_order_relaxed);
  auto table = std::make_unique<Table>(old ? old->slots.size() * 2 : 128);
  if (old)
    for (const Slot& from : old->slots) {
      const char* name = from.name.load(std::memory_order_relaxed);
      if (!name) continue;
      Slot& to = find(*table, name);
      to.count.store(from.count.load(std::memory_order_relaxed), std::memory_order_relaxed);
      to.ns.store(from.ns.load(std::memory_order_relaxed), std::memory_order_relaxed);
      to.generation.store(from.generation.load(std::memory_order_relaxed), std::memory_order_relaxed);
      to.name.store(name, std::memory_order_relaxed);
      ++table->used;
    }
  table_.store(table.get(), std::memory_order_release);
  tables_.push_back(std::move(table));
}

void ThreadTotals::add(const char* name, int64_t ns, uint32_t generation) {
  Table& table = *table_.load(std::memory_order_relaxed);
  Slot& slot = find(table, name);
  if (!slot.name.load(std::memory_order_relaxed)) {
    if (2 * ++table.used > table.slots.size()) {
      grow();
      return add(name, ns, generation);
    }
    slot.name.store(name, std::memory_order_release);
  }
  int64_t count = 0, sum = 0;
  if (slot.generation.load(std::memory_order_relaxed) == generation) {
    count = slot.count.load(std::memory_order_relaxed);
    sum = slot.ns.load(std::memory_order_relaxed);
  }
  slot.count.store(count + 1, std::memory_order_relaxed);
  slot.ns.store(sum + ns, std::memory_order_relaxed);
  slot.generation.store(generation, std::memory_order_release);
}

void ThreadTotals::read(uint32_t generation, Sums& sums) const {
  for (const Slot& slot : table_.load(std::memory_order_acquire)->slots) {
    const char* name = slot.name.load(std::memory_order_acquire);
    if (!name || slot.generation.load(std::memory_order_acquire) != generation) continue;
    Total& total = sums[name];
    total.name = name;
    total.count += slot.count.load(std::memory_order_relaxed);
    total.seconds += static_cast<double>(slot.ns.load(std::memory_order_relaxed)) * 1e-9;
  }
}

void ThreadLog::add(const Event& event) {
  // In one order with the closing of a window (take() in trace.cpp), which then waits for `writing`.
  writing.store(true, std::memory_order_seq_cst);
  if (const uint32_t id = detail::window.load(std::memory_order_seq_cst)) {
    EventSpace& space = *event_space.load(std::memory_order_relaxed);
    if (window != id) {
      window = id;
      chunk = space.take();
    }
    if (chunk && chunk->used.load(std::memory_order_relaxed) == EventSpace::Chunk::capacity)
      chunk = space.take();
    if (chunk) {
      const uint32_t used = chunk->used.load(std::memory_order_relaxed);
      chunk->events[used] = event;
      chunk->used.store(used + 1, std::memory_order_release);
    } else {
      space.drop();
    }
  }
  writing.store(false, std::memory_order_release);
}

}  // namespace nrl::trace::detail
