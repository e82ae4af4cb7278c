#pragma once
// File access: checked system calls (EINTR and short transfers are retried, every error names path and
// cause), and atomic replacement of files.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nrl {

/// Operations that change the file system; see set_file_op_hook.
enum class FileOp { create, make_directory, allocate, truncate, write, fsync, rename, remove, touch };

/// Test hook, called before every operation that changes the file system. Returns 0 to proceed, or an errno
/// value that the operation then fails with; it may also end the process to simulate a crash. nullptr removes
/// it. Must not be used in production.
using FileOpHook = int (*)(FileOp op, const std::string& path);
void set_file_op_hook(FileOpHook hook);

/// An open file descriptor with the path it was opened by. Movable; closes on destruction.
class File {
 public:
  File() = default;
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  File(File&& o) noexcept;
  File& operator=(File&& o) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  enum class Links { follow, refuse };
  /// Opens a regular file for reading; anything else (directory, FIFO, device) is Exit::no_input.
  static File open_read(const std::string& path, Links links = Links::follow);
  /// Creates a new file for writing (O_EXCL, O_NOFOLLOW, mode 0644 & ~umask). Exit::cannot_create.
  static File create(const std::string& path);

  bool is_open() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  uint64_t size() const;

  /// Reads exactly `bytes` bytes at `offset`. Exit::data when the file ends before that,
  /// Exit::io on a read error.
  void pread_all(void* dst, size_t bytes, uint64_t offset) const;
  /// Writes all bytes at `offset`. Exit::io.
  void pwrite_all(const void* src, size_t bytes, uint64_t offset) const;
  /// Reserves `bytes` bytes of disk space, so that a full disk is detected before writing. No-op on file
  /// systems without fallocate.
  void allocate(uint64_t bytes) const;
  /// Sets the size. Exit::io.
  void truncate(uint64_t bytes) const;
  /// fsync. A failure is final: the kernel may have dropped the data, so the file must be abandoned and must
  /// not be synced again (Rebello et al., "Can Applications Recover from fsync Failures?", ATC'20).
  void sync() const;
  /// Sets the time of the last change to now.
  void touch() const;
  /// Closes and reports a late write error.
  void close();

 private:
  int fd_ = -1;
  std::string path_;
};

/// The whole file; Exit::data when it is larger than `max_bytes`.
std::string read_file(const std::string& path, uint64_t max_bytes, File::Links links = File::Links::follow);

/// Durable::yes: a change is on the disk when the call returns.
enum class Durable : bool { no, yes };

/// A file that appears under its final name only at commit(): written under a temporary name in the same
/// directory, fsynced and renamed over the target, and the directory is fsynced. Removed without commit().
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  /// Appends.
  void write(std::string_view data);
  /// For random access instead of write(), until commit().
  const File& file() const { return file_; }
  /// `Durable::no`: without the fsyncs, which may take 10 ms each; other processes still see the old or the
  /// new file, but a crash of the machine may leave an empty one.
  void commit(Durable durable = Durable::yes);

 private:
  std::string path_, temporary_;
  File file_;
  uint64_t size_ = 0;
};

/// Writes `text` through an AtomicFile.
void write_file_atomic(const std::string& path, std::string_view text, Durable durable = Durable::yes);

/// fsyncs the directory: makes new entries, renames and removals in it durable.
void fsync_directory(const std::string& path);
/// Creates one directory (Exit::cannot_create); the parent is not synced.
void make_directory(const std::string& path);
/// Creates the directory and its missing parents, durably. Existing directories are not an error.
void make_directories(const std::string& path);
void rename_path(const std::string& from, const std::string& to);
/// Atomically swaps two existing paths; false where the file system does not support it.
bool exchange_paths(const std::string& a, const std::string& b);
/// Removes a file or a directory tree. Symbolic links are removed, not followed.
/// Missing paths are not an error.
void remove_tree(const std::string& path);
/// Names in a directory without "." and "..", sorted. Exit::no_input when it cannot be read.
std::vector<std::string> list_directory(const std::string& path);
bool path_exists(const std::string& path);
bool is_directory(const std::string& path);
/// Whether both paths refer to the same existing directory.
bool same_directory(const std::string& a, const std::string& b);

/// "dir/name"; `dir` may be empty or end with a slash.
std::string join_path(std::string_view dir, std::string_view name);
/// The directory part, "." when there is none.
std::string parent_path(const std::string& path);
/// True for a name that stays inside its directory: not empty, not "." or "..", no '/', no NUL, at most
/// 255 bytes.
bool is_plain_name(std::string_view name);
/// 64 random bits as 16 hexadecimal digits.
std::string random_nonce();
/// Whether `name` is `stem` and a nonce. An AtomicFile for FILE is written as has_nonce(name, "FILE.tmp-").
bool has_nonce(std::string_view name, std::string_view stem);

}  // namespace nrl
