#include "memory/plan.h"

#include <algorithm>
#include <numeric>

#include "core/base/error.h"

namespace nrl::memory {

BufferId MemoryPlan::add(std::string name, Category category, int64_t bytes, Lifetime lifetime) {
  NRL_CHECK(!solved_ && bytes >= 0 && lifetime.first <= lifetime.last, "buffer {}", name);
  const int64_t rounded = (bytes + alignment - 1) / alignment * alignment;
  buffers_.push_back({std::move(name), category, rounded, 0, lifetime});
  return static_cast<BufferId>(buffers_.size()) - 1;
}

void MemoryPlan::solve() {
  NRL_CHECK(!solved_);
  solved_ = true;
  for (int c = 0; c < category_count; ++c) {
    std::vector<size_t> order;
    for (size_t i = 0; i < buffers_.size(); ++i)
      if (static_cast<int>(buffers_[i].category) == c && buffers_[i].bytes > 0) order.push_back(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return buffers_[a].bytes > buffers_[b].bytes; });
    std::vector<size_t> placed;  // by offset
    int64_t& arena = bytes_[static_cast<size_t>(c)];
    for (size_t i : order) {
      Buffer& buffer = buffers_[i];
      int64_t offset = 0;
      for (size_t j : placed) {
        const Buffer& other = buffers_[j];
        const bool together =
            buffer.lifetime.first <= other.lifetime.last && other.lifetime.first <= buffer.lifetime.last;
        if (!together || other.offset + other.bytes <= offset) continue;
        if (other.offset >= offset + buffer.bytes) break;
        offset = other.offset + other.bytes;
      }
      buffer.offset = offset;
      arena = std::max(arena, offset + buffer.bytes);
      placed.insert(
          std::upper_bound(placed.begin(), placed.end(), i,
                           [&](size_t a, size_t b) { return buffers_[a].offset < buffers_[b].offset; }),
          i);
    }
  }
}

int64_t MemoryPlan::total_bytes() const {
  return std::accumulate(bytes_.begin(), bytes_.end(), int64_t{0});
}

int64_t MemoryPlan::bytes_without_sharing(Category c) const {
  int64_t sum = 0;
  for (const Buffer& b : buffers_)
    if (b.category == c) sum += b.bytes;
  return sum;
}

Arenas::Arenas(const MemoryPlan& plan) {
  for (size_t c = 0; c < category_count; ++c) {
    const int64_t bytes = plan.bytes(static_cast<Category>(c));
    host_[c] = cpu::HostMemory(static_cast<size_t>(bytes));
    blocks_[c] = {host_[c].data(), bytes};
  }
}

Arenas::Arenas(const MemoryPlan& plan, device::Runtime& device, device::StreamHandle stream)
    : device_(device, device::Memory::Kind::device, static_cast<size_t>(plan.total_bytes())) {
  std::byte* next = device_.data();
  for (size_t c = 0; c < category_count; ++c) {
    blocks_[c] = {next, plan.bytes(static_cast<Category>(c))};
    next += blocks_[c].size;
  }
  if (device_.size() > 0) device.fill(device_.data(), 0, device_.size(), stream);
}

void* Arenas::at(const MemoryPlan& plan, BufferId id) const {
  const auto& buffer = plan.buffers()[static_cast<size_t>(id)];
  const auto& block = blocks_[static_cast<size_t>(buffer.category)];
  NRL_CHECK(buffer.offset + buffer.bytes <= block.size, "buffer {} lies outside its arena", buffer.name);
  return block.data + buffer.offset;
}

}  // namespace nrl::memory
