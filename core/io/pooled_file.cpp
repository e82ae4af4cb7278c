#include "core/io/pooled_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include <sys/resource.h>
#include <sys/stat.h>

#include "core/base/error.h"

namespace nrl {
namespace {

constexpr size_t most_open = 64;

// All open PooledFiles, the most recently used first.
struct Pool {
  std::mutex mutex;
  std::list<const PooledFile*> open;
};

Pool& pool() {
  static Pool all;
  return all;
}

size_t limit() {
  struct rlimit files;
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0) return most_open;
  return std::clamp<size_t>(files.rlim_cur / 8, 1, most_open);
}

struct stat status_of(const File& file) {
  struct stat now;
  if (::fstat(file.fd(), &now) != 0) fail(Exit::io, "{}: cannot stat: {}", file.path(), std::strerror(errno));
  return now;
}

}  // namespace

PooledFile::PooledFile(const std::string& path, File::Links links) : path_(path), links_(links) {
  const std::lock_guard lock(pool().mutex);
  std::shared_ptr<const File> file = open_another();
  const struct stat now = status_of(*file);
  size_ = static_cast<uint64_t>(now.st_size);
  device_ = now.st_dev;
  inode_ = now.st_ino;
  keep(std::move(file));
}

PooledFile::~PooledFile() {
  const std::lock_guard lock(pool().mutex);
  if (file_) pool().open.erase(position_);
}

void PooledFile::pread_all(void* dst, size_t bytes, uint64_t offset) const {
  open()->pread_all(dst, bytes, offset);
}

std::shared_ptr<const File> PooledFile::open_another() const {
  std::list<const PooledFile*>& open = pool().open;
  // A file that another thread is reading stays open until that is over.
  for (; open.size() >= limit(); open.pop_back()) open.back()->file_.reset();
  return std::make_shared<const File>(File::open_read(path_, links_));
}

void PooledFile::keep(std::shared_ptr<const File> file) const {
  pool().open.push_front(this);
  position_ = pool().open.begin();
  file_ = std::move(file);
}

std::shared_ptr<const File> PooledFile::open() const {
  std::list<const PooledFile*>& open = pool().open;
  const std::lock_guard lock(pool().mutex);
  if (file_) {
    open.splice(open.begin(), open, position_);
    return file_;
  }
  std::shared_ptr<const File> file = open_another();
  const struct stat now = status_of(*file);
  if (now.st_dev != device_ || now.st_ino != inode_ || static_cast<uint64_t>(now.st_size) != size_)
    fail(Exit::data, "{}: was replaced while it was read", path_);
  keep(file);
  return file;
}

}  // namespace nrl
