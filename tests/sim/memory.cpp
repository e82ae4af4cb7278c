#include "tests/sim/memory.h"

#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/text.h"
#include "tests/sim/engine/sanitizers.h"

namespace nrl::sim {
namespace {

constexpr size_t alignment = 256;
// Opening and closing costs time by the page.
constexpr size_t largest_guarded = size_t{32} << 20;
// Released blocks whose addresses are not used again yet. The system limits mappings, not addresses.
constexpr size_t most_released = 512;

size_t round_up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}
size_t page() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}
void protect_pages(std::byte* begin, size_t bytes, bool accessible) {
  if (mprotect(begin, bytes, accessible ? PROT_READ | PROT_WRITE : PROT_NONE) != 0)
    fail(Exit::internal, "simulated device: mprotect failed: {}", std::strerror(errno));
}

}  // namespace

Heap::~Heap() {
  while (!blocks_.empty()) release(const_cast<std::byte*>(blocks_.begin()->first));
  for (const Allocation& block : released_) unmap(block);
}

void Heap::unmap(const Allocation& block) {
  sanitizer::unpoison(block.map, block.mapped);  // the addresses may come back for something else
  munmap(block.map, block.mapped);
}

void Heap::protect(const Allocation& block, bool accessible) {
  protect_pages(block.map, block.mapped - page(), accessible);
}

void Heap::protect(const Reach::Range& range, bool accessible) const {
  const Allocation* block = block_of(range.data, range.bytes);
  if (!block || !block->guarded) return;
  const size_t offset = static_cast<size_t>(static_cast<const std::byte*>(range.data) - block->map);
  const size_t begin = offset / page() * page();
  protect_pages(block->map + begin, round_up(offset + range.bytes, page()) - begin, accessible);
}

void* Heap::allocate(size_t bytes) {
  // The block's end, rounded to its alignment, is where the guard page begins.
  const size_t body = round_up(bytes == 0 ? 1 : bytes, alignment), pages = round_up(body, page());
  Allocation block;
  block.mapped = pages + page();
  block.bytes = bytes;
  block.guarded = guarded_ && pages <= largest_guarded;
  void* map = mmap(nullptr, block.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) fail(Exit::out_of_memory, "the system refused {} of memory", human_bytes(bytes));
  block.map = static_cast<std::byte*>(map);
  protect(block, true);
  std::byte* data = block.map + (pages - body);
  std::memset(data, 0xFF, body);  // NaN in every float format
  sanitizer::poison(block.map, static_cast<size_t>(data - block.map));
  sanitizer::poison(data + bytes, body - bytes);
  if (block.guarded && !all_open_) protect(block, false);
  blocks_.emplace(data, block);
  used_ += bytes;
  return data;
}

bool Heap::release(void* p) {
  const auto it = blocks_.find(static_cast<const std::byte*>(p));
  if (it == blocks_.end()) return false;
  const Allocation block = it->second;
  blocks_.erase(it);
  used_ -= block.bytes;
  protect(block, false);
  (void)madvise(block.map, block.mapped, MADV_DONTNEED);
  sanitizer::poison(block.map, block.mapped);
  released_.push_back(block);
  if (released_.size() > most_released) {
    unmap(released_.front());
    released_.pop_front();
  }
  return true;
}

const Heap::Allocation* Heap::block_of(const void* p, size_t bytes) const {
  const auto* first = static_cast<const std::byte*>(p);
  auto it = blocks_.upper_bound(first);
  if (it == blocks_.begin()) return nullptr;
  --it;
  const size_t offset = static_cast<size_t>(first - it->first);
  return offset <= it->second.bytes && bytes <= it->second.bytes - offset ? &it->second : nullptr;
}

bool Heap::contains(const void* p, size_t bytes) const {
  return block_of(p, bytes) != nullptr;
}

void Heap::open(const Reach& reach) {
  ++opened_;
  if (all_open_) return;
  if (reach.all) {
    all_open_ = true;
    for (const auto& [p, block] : blocks_)
      if (block.guarded) protect(block, true);
    return;
  }
  for (const Reach::Range& range : reach.ranges) {
    protect(range, true);
    open_ranges_.push_back(range);
  }
}

void Heap::close() {
  if (--opened_ > 0) return;
  if (all_open_) {
    for (const auto& [p, block] : blocks_)
      if (block.guarded) protect(block, false);
  } else {
    for (const Reach::Range& range : open_ranges_) protect(range, false);
  }
  all_open_ = false;
  open_ranges_.clear();
}

}  // namespace nrl::sim
