#include "core/device/cpu/memory.h"

#include <cstdio>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::cpu {

HostMemory::HostMemory(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) fail(Exit::out_of_memory, "the system refused {} of memory", human_bytes(bytes));
  data_ = static_cast<std::byte*>(p);
  // Advice only: without huge pages it is slower, not wrong.
  if (bytes >= (size_t{8} << 20)) (void)madvise(p, bytes, MADV_HUGEPAGE);
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

size_t peak_resident_bytes() {
  // Not getrusage(): its ru_maxrss lives through exec() and so begins with the peak of the program that
  // started this one.
  size_t kib = 0;
  if (FILE* f = std::fopen("/proc/self/status", "r")) {
    char line[256];
    while (kib == 0 && std::fgets(line, sizeof line, f) != nullptr)
      if (std::sscanf(line, "VmHWM: %zu kB", &kib) != 1) kib = 0;
    std::fclose(f);
  }
  return kib > 0 ? kib * 1024 : resident_bytes();
}

size_t resident_bytes() {
  size_t total = 0, resident = 0;
  if (FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%zu %zu", &total, &resident) != 2) resident = 0;
    std::fclose(f);
  }
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace nrl::cpu
