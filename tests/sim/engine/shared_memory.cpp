#include "tests/sim/engine/shared_memory.h"

#include <algorithm>
#include <cstdint>
#include <new>

#include <sys/mman.h>

#include <spdlog/fmt/fmt.h>

#include "tests/sim/engine/engine.h"
#include "tests/sim/engine/sanitizers.h"

namespace nrl::sim {
namespace {

constexpr size_t page = 4096;
constexpr size_t max_arrays = 64;
constexpr size_t guard = 32;  // bytes behind each static array
constexpr size_t dynamic_area = (max_shared + page - 1) / page * page;
constexpr size_t static_area = (max_static_shared + max_arrays * (guard + 128) + page - 1) / page * page;

constexpr size_t round_up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

// NaN in fp32, bf16 and the fp8 formats. Not memset: to the thread sanitizer it would be a kernel's access.
void fill_with_nan(std::byte* p, size_t bytes) {
  size_t i = 0;
  for (; i + 8 <= bytes; i += 8) *reinterpret_cast<volatile uint64_t*>(p + i) = ~uint64_t{0};
  for (; i < bytes; ++i) *reinterpret_cast<volatile uint8_t*>(p + i) = 0xff;
}

}  // namespace

std::byte* map_pages(size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* p = mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  mprotect(p, page, PROT_NONE);
  return static_cast<std::byte*>(p) + page;
}

void unmap_pages(std::byte* p, size_t bytes) {
  sanitizer::unpoison(p, bytes);
  munmap(p - page, bytes + page);
}

SharedMemory::SharedMemory() : memory_(map_pages(dynamic_area + static_area)) {
  arrays_.reserve(max_arrays);  // it grows on fibers, where an allocation would look like a race
}

SharedMemory::~SharedMemory() {
  unmap_pages(memory_, dynamic_area + static_area);
}

void SharedMemory::reset(size_t dynamic_bytes) {
  sanitizer::unpoison(memory_, dynamic_bytes);
  fill_with_nan(memory_, dynamic_bytes);
  sanitizer::poison(memory_ + dynamic_bytes, dynamic_area + static_area - dynamic_bytes);
  dynamic_bytes_ = dynamic_bytes;
  static_bytes_ = top_ = 0;
  arrays_.clear();
}

std::byte* SharedMemory::array(const void* key, size_t bytes, size_t align, std::string& reason) {
  for (const Array& array : arrays_) {
    if (array.key == key) return array.data;
  }
  static_bytes_ = round_up(static_bytes_, align) + bytes;
  if (static_bytes_ > max_static_shared || arrays_.size() == max_arrays) {
    reason = fmt::format("{} bytes of static shared memory in {} arrays are more than {} bytes or {} arrays",
                         static_bytes_, arrays_.size() + 1, max_static_shared, max_arrays);
    return nullptr;
  }
  const size_t limit = dynamic_bytes_ > dynamic_shared_unasked ? max_shared : shared_memory_unasked;
  if (static_bytes_ + dynamic_bytes_ > limit) {
    reason = fmt::format("{} bytes of static and {} of dynamic shared memory are more than {}", static_bytes_,
                         dynamic_bytes_, limit);
    return nullptr;
  }
  // An array whose type does not ask for 16 bytes of alignment never has them: the GPU does not promise them.
  constexpr size_t vector = 16;
  size_t at = round_up(top_, std::max(align, vector));
  if (align < vector) at += vector / 2;
  top_ = at + bytes + guard;
  std::byte* data = memory_ + dynamic_area + at;
  sanitizer::unpoison(data, bytes);
  fill_with_nan(data, bytes);
  arrays_.push_back({key, data});
  return data;
}

bool SharedMemory::contains(const void* p, size_t bytes) const {
  const auto* at = static_cast<const std::byte*>(p);
  return at >= memory_ && at + bytes <= memory_ + dynamic_area + static_area;
}

}  // namespace nrl::sim
