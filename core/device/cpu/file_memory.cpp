#include "core/device/cpu/file_memory.h"

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::cpu {
namespace {

constexpr const char* fix = "Fix: memory.offload_dir: a directory on a disk with enough free space";

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// A file without a name. Where the file system has no such files, one whose name is removed at once.
int unnamed_file(const std::string& directory) {
  const int fd = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return fd;
  std::string path = directory + "/nrl-train-offload-XXXXXX";
  const int named = ::mkostemp(path.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(path.c_str());
  return named;
}

bool in_memory(const std::string& directory) {
  struct statfs fs {};
  return ::statfs(directory.c_str(), &fs) == 0 && (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC);
}

struct Pages {
  std::byte* begin;
  size_t bytes;
};

Pages touched_pages(const void* begin, size_t bytes) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(begin) / page * page;
  const auto last = (reinterpret_cast<uintptr_t>(begin) + bytes + page - 1) / page * page;
  return {reinterpret_cast<std::byte*>(first), last - first};
}

}  // namespace

FileMemory::FileMemory(const std::string& directory, size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  const Descriptor file(unnamed_file(directory));
  if (file.get() < 0)
    fail(Exit::cannot_create, "{}: a file for offloaded memory cannot be created: {}. {}", directory,
         std::strerror(errno), fix);
  int error = 0;
  do error = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
  while (error == EINTR);
  if (error != 0) {
    struct statvfs fs {};
    const uint64_t available = ::statvfs(directory.c_str(), &fs) == 0 ? fs.f_bavail * fs.f_frsize : 0;
    fail(Exit::io, "{}: {} for offloaded memory cannot be reserved: {}; free: {}. {}", directory,
         human_bytes(bytes), std::strerror(error), human_bytes(available), fix);
  }
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (p == MAP_FAILED && errno == ENOMEM)
    fail(Exit::out_of_memory,
         "the system refused {} of address space for offloaded memory. Fix: raise ulimit -v, or offload less",
         human_bytes(bytes));
  if (p == MAP_FAILED)
    fail(Exit::io, "{}: a file of {} for offloaded memory cannot be mapped: {}. {}", directory,
         human_bytes(bytes), std::strerror(errno), fix);
  data_ = static_cast<std::byte*>(p);
}

FileMemory::~FileMemory() {
  if (data_) ::munmap(data_, size_);
}

FileMemory::FileMemory(FileMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

FileMemory& FileMemory::operator=(FileMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void FileMemory::prefetch(const void* begin, size_t bytes) const {
  if (bytes == 0) return;
  const Pages pages = touched_pages(begin, bytes);
  (void)::madvise(pages.begin, pages.bytes, MADV_WILLNEED);
}

void FileMemory::evict(const void* begin, size_t bytes) const {
  if (bytes == 0) return;
  // Of a shared mapping this drops no contents, so that partly used pages may go, too.
  const Pages pages = touched_pages(begin, bytes);
  (void)::madvise(pages.begin, pages.bytes, MADV_DONTNEED);
}

std::string scratch_directory(const std::string& configured) {
  if (!configured.empty()) {
    if (in_memory(configured))
      fail(Exit::config, "memory.offload_dir: {} lies in memory (tmpfs), so that offloading saves none. {}",
           configured, fix);
    return configured;
  }
  const char* temporary = std::getenv("TMPDIR");
  return temporary && *temporary && !in_memory(temporary) ? temporary : "/var/tmp";
}

}  // namespace nrl::cpu
