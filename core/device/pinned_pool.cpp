#include "core/device/pinned_pool.h"

#include <algorithm>
#include <bit>

#include "core/base/error.h"

namespace nrl::device {

bool PinnedPool::Entry::done() const {
  return std::all_of(uses.begin(), uses.end(), [](const Use& use) { return use.event.done(); });
}

PinnedPool::~PinnedPool() = default;  // releasing pinned memory waits for what uses it

PinnedPool::Block PinnedPool::take(size_t bytes) {
  constexpr size_t smallest = 4096;
  const size_t capacity = std::bit_ceil(std::max(bytes, smallest));
  {
    const std::lock_guard lock(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if ((*it)->memory.size() != capacity || !(*it)->done()) continue;
      std::unique_ptr<Entry> entry = std::move(*it);
      free_.erase(it);
      // Events of streams are free again: the next loan may use other streams.
      for (Entry::Use& use : entry->uses) entry->spare.push_back(std::move(use.event));
      entry->uses.clear();
      return {this, std::move(entry), bytes};
    }
  }
  auto entry = std::make_unique<Entry>();
  entry->memory = Memory(runtime_, Memory::Kind::pinned, capacity);
  const std::lock_guard lock(mutex_);
  allocated_ += capacity;
  return {this, std::move(entry), bytes};
}

size_t PinnedPool::allocated() const {
  const std::lock_guard lock(mutex_);
  return allocated_;
}

void PinnedPool::give(std::unique_ptr<Entry> entry) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(entry));
}

PinnedPool::Block::Block(PinnedPool* pool, std::unique_ptr<Entry> entry, size_t size)
    : pool_(pool), entry_(std::move(entry)), size_(size) {}

PinnedPool::Block::~Block() {
  if (entry_) pool_->give(std::move(entry_));
}

std::byte* PinnedPool::Block::data() const {
  return entry_->memory.data();
}

void PinnedPool::Block::used_in(StreamHandle stream) {
  auto& uses = entry_->uses;
  auto use = std::find_if(uses.begin(), uses.end(), [=](const Entry::Use& u) { return u.stream == stream; });
  if (use == uses.end()) {
    if (entry_->spare.empty()) {
      uses.push_back({stream, Event(pool_->runtime_)});
    } else {
      uses.push_back({stream, std::move(entry_->spare.back())});
      entry_->spare.pop_back();
    }
    use = uses.end() - 1;
  }
  use->event.record(stream);
}

void PinnedPool::Block::copy_to(void* device, size_t offset, size_t bytes, StreamHandle stream) {
  NRL_CHECK(offset <= size_ && bytes <= size_ - offset);
  pool_->runtime_.copy(device, data() + offset, bytes, CopyKind::host_to_device, stream);
  used_in(stream);
}

void PinnedPool::Block::copy_from(const void* device, size_t offset, size_t bytes, StreamHandle stream) {
  NRL_CHECK(offset <= size_ && bytes <= size_ - offset);
  pool_->runtime_.copy(data() + offset, device, bytes, CopyKind::device_to_host, stream);
  used_in(stream);
}

bool PinnedPool::Block::done() const {
  return entry_->done();
}

void PinnedPool::Block::wait() const {
  for (const Entry::Use& use : entry_->uses) use.event.synchronize();
}

}  // namespace nrl::device
