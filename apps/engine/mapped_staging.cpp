#include "apps/engine/mapped_staging.h"

#include <cstring>

namespace nrl::engine {

bool MappedStaging::in_file(const void* p) const {
  const std::span<std::byte> file = arenas_.memory(memory::Tier::host);
  const auto* byte = static_cast<const std::byte*>(p);
  return byte >= file.data() && byte < file.data() + file.size();
}

// Evicts the range that was read last.
void MappedStaging::evict() {
  if (read_ == 0) return;
  const MemoryRange& last = ranges_[read_ - 1];
  if (in_file(last.data)) arenas_.evict(last.data, static_cast<int64_t>(last.bytes));
}

void MappedStaging::read_ahead(std::vector<MemoryRange> ranges) {
  evict();
  ranges_ = std::move(ranges);
  read_ = 0;
}

const void* MappedStaging::next() {
  NRL_CHECK(read_ < ranges_.size(), "all {} pieces were read", ranges_.size());
  evict();
  const MemoryRange& range = ranges_[read_++];
  if (read_ < ranges_.size() && in_file(ranges_[read_].data))
    arenas_.prefetch(ranges_[read_].data, static_cast<int64_t>(ranges_[read_].bytes));
  return range.data;
}

void* MappedStaging::buffer() {
  buffer_.resize(size);
  return buffer_.data();
}

void MappedStaging::write(void* to, size_t bytes) {
  NRL_CHECK(bytes <= size, "a piece of {} bytes, the buffer has {}", bytes, size);
  std::memcpy(to, buffer_.data(), bytes);
  if (in_file(to)) arenas_.evict(to, static_cast<int64_t>(bytes));
}

}  // namespace nrl::engine
