#include "core/device/cpu/memory.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::cpu {

namespace {

// Fields of a file like /proc/self/status that are given in kB, as bytes; 0 for those it lacks.
template <size_t n>
std::array<int64_t, n> file_bytes(const char* path, const char* const (&names)[n]) {
  std::array<int64_t, n> bytes{};
  if (FILE* f = std::fopen(path, "r")) {
    char line[256], name[64];
    long long kib = 0;
    while (std::fgets(line, sizeof line, f) != nullptr)
      if (std::sscanf(line, "%63[^:]: %lld kB", name, &kib) == 2)
        for (size_t i = 0; i < n; ++i)
          if (std::strcmp(name, names[i]) == 0) bytes[i] = kib * 1024;
    std::fclose(f);
  }
  return bytes;
}

template <size_t n>
std::array<int64_t, n> status_bytes(const char* const (&names)[n]) {
  return file_bytes("/proc/self/status", names);
}

}  // namespace

HostMemory::HostMemory(size_t bytes, bool reserved) : size_(bytes) {
  if (bytes == 0) return;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (reserved ? 0 : MAP_NORESERVE);
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (p == MAP_FAILED) fail(Exit::out_of_memory, "the system refused {} of memory", human_bytes(bytes));
  data_ = static_cast<std::byte*>(p);
  // Advice only: without huge pages it is slower, not wrong.
  if (reserved && bytes >= (size_t{8} << 20)) (void)madvise(p, bytes, MADV_HUGEPAGE);
}

HostMemory::~HostMemory() {
  if (data_) munmap(data_, size_);
}

HostMemory::HostMemory(HostMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

HostMemory& HostMemory::operator=(HostMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void HostMemory::shrink(size_t bytes) {
  NRL_CHECK(bytes <= size_, "{} of {} bytes", bytes, size_);
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t keep = (bytes + page - 1) / page * page;
  if (keep == 0) {
    *this = HostMemory();
  } else {
    if (keep < size_) munmap(data_ + keep, size_ - keep);
    size_ = bytes;
  }
}

size_t obtainable_memory() {
  size_t least = machine_memory();
  if (const int64_t available = file_bytes("/proc/meminfo", {"MemAvailable"})[0]; available > 0)
    least = std::min(least, static_cast<size_t>(available));
  const auto [data, mapped] = status_bytes({"VmData", "VmSize"});
  for (const auto& [resource, used] : {std::pair(RLIMIT_DATA, data), std::pair(RLIMIT_AS, mapped)}) {
    rlimit limit{};
    if (getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
      least = std::min<size_t>(least,
                               limit.rlim_cur - std::min<size_t>(limit.rlim_cur, static_cast<size_t>(used)));
  }
  return least;
}

size_t peak_resident_bytes() {
  // Not getrusage(): its ru_maxrss lives through exec() and so begins with the peak of the program that
  // started this one.
  const int64_t bytes = status_bytes({"VmHWM"})[0];
  return bytes > 0 ? static_cast<size_t>(bytes) : resident_bytes();
}

ResidentMemory resident_memory() {
  const auto [anonymous, files, shared] = status_bytes({"RssAnon", "RssFile", "RssShmem"});
  const struct mallinfo2 heap = mallinfo2();
  return {.anonymous = anonymous,
          .files = files,
          .shared = shared,
          .heap_used = static_cast<int64_t>(heap.uordblks + heap.hblkhd),
          .heap_free = static_cast<int64_t>(heap.fordblks)};
}

size_t resident_bytes() {
  size_t total = 0, resident = 0;
  if (FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%zu %zu", &total, &resident) != 2) resident = 0;
    std::fclose(f);
  }
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

void arrange_heap() {
  // Once: the second block is never freed.
  static void* volatile above = [] {
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 64 << 20);
    // Small requests are taken from the smallest free block that they fit into: this one, as long as larger
    // blocks are freed above the second one. Both are addresses only until they are written.
    constexpr size_t block = size_t{4} << 20;
    void* volatile free_block = std::malloc(block);
    void* stays = std::malloc(block);
    std::free(free_block);
    return stays;
  }();
  static_cast<void>(above);
}

void release_free_heap() {
  malloc_trim(0);
}

}  // namespace nrl::cpu
