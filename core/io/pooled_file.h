#pragma once
// Files of which only a few are open at a time.

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>

#include <sys/types.h>

#include "core/io/atomic_file.h"

namespace nrl {

/// A regular file open for reading. Of all PooledFiles of the process at most 64, and at most an eighth of
/// the limit on open files (ulimit -n), are open: opening one more closes the least recently used, which is
/// reopened when it is read again. Thread-safe.
class PooledFile {
 public:
  /// Opens the file; fails like File::open_read().
  explicit PooledFile(const std::string& path, File::Links links = File::Links::follow);
  PooledFile(const PooledFile&) = delete;
  PooledFile& operator=(const PooledFile&) = delete;
  ~PooledFile();

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  /// Like File::pread_all(); Exit::data as well when the file was replaced while it was closed.
  void pread_all(void* dst, size_t bytes, uint64_t offset) const;

 private:
  std::shared_ptr<const File> open() const;
  // With the pool's mutex locked:
  std::shared_ptr<const File> open_another() const;  ///< closes others if there are too many
  void keep(std::shared_ptr<const File> file) const;

  std::string path_;
  File::Links links_;
  uint64_t size_ = 0;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  mutable std::shared_ptr<const File> file_;                 // null: closed. Guarded by the pool's mutex
  mutable std::list<const PooledFile*>::iterator position_;  // in the pool, if it is open
};

}  // namespace nrl
