#pragma once
// Files: checked system calls (EINTR and short transfers retried, every error named with path and cause), and
// files that appear whole or not at all.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nrl {

/// Operations that change the file system; see set_file_op_hook.
enum class FileOp { create, make_directory, allocate, write, fsync, rename, remove };

/// Test hook, called before every changing operation of this file: returns 0 to go on, or an errno value that
/// the operation then fails with (and may end the process, to stand for a crash). nullptr removes it. Not for
/// production.
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
  /// Opens a regular file for reading; anything else (directory, FIFO, device) is refused. Exit::no_input.
  static File open_read(const std::string& path, Links links = Links::follow);
  /// Creates a new file for writing (O_EXCL, O_NOFOLLOW, mode 0644 & ~umask). Exit::cannot_create.
  static File create(const std::string& path);

  bool is_open() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  uint64_t size() const;

  /// Reads exactly `bytes` bytes at `offset`; the end of the file before that is Exit::data, a failure
  /// Exit::io.
  void pread_all(void* dst, size_t bytes, uint64_t offset) const;
  /// Writes all of it at `offset`. Exit::io.
  void pwrite_all(const void* src, size_t bytes, uint64_t offset) const;
  /// Reserves `bytes` bytes of disk space, so that a full disk shows before the writing. File systems that
  /// cannot reserve are left alone.
  void allocate(uint64_t bytes) const;
  /// fsync. A failure is final: the kernel may have dropped the data, so the file must be given up, never
  /// synced again (Rebello et al., "Can Applications Recover from fsync Failures?", ATC'20).
  void sync() const;
  /// Closes and reports a late write error.
  void close();

 private:
  int fd_ = -1;
  std::string path_;
};

/// The whole file, refused with Exit::data when larger than `max_bytes`.
std::string read_file(const std::string& path, uint64_t max_bytes, File::Links links = File::Links::follow);

/// A file that takes its final name only at commit(): it is written under a temporary name in the same
/// directory, fsynced, renamed over the target, and the directory fsynced. Without commit it leaves nothing
/// behind.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  /// Appends.
  void write(std::string_view data);
  void commit();

 private:
  std::string path_, temporary_;
  File file_;
  uint64_t size_ = 0;
};

/// AtomicFile with one piece of text.
void write_file_atomic(const std::string& path, std::string_view text);

/// Makes a new entry, a rename or a removal in the directory durable.
void fsync_directory(const std::string& path);
/// Creates one directory (Exit::cannot_create); the parent is not synced.
void make_directory(const std::string& path);
/// Creates the directory and its missing parents, durably; one that is there already is fine.
void make_directories(const std::string& path);
void rename_path(const std::string& from, const std::string& to);
/// Swaps two existing paths in one step; false where the file system cannot.
bool exchange_paths(const std::string& a, const std::string& b);
/// Removes a file or a directory with all it holds, links themselves and not what they point to. Missing is
/// fine.
void remove_tree(const std::string& path);
/// Names in a directory without "." and "..", sorted. Exit::no_input when it cannot be read.
std::vector<std::string> list_directory(const std::string& path);
bool path_exists(const std::string& path);
bool is_directory(const std::string& path);
/// Whether both paths lead to one existing directory.
bool same_directory(const std::string& a, const std::string& b);

/// "dir/name"; `dir` may be empty or end with a slash.
std::string join_path(std::string_view dir, std::string_view name);
/// The directory part, "." when there is none.
std::string parent_path(const std::string& path);
/// True for a name that stays inside its directory: not empty, not "." or "..", no '/', no NUL, at most 255
/// bytes.
bool is_plain_name(std::string_view name);
/// 64 random bits as 16 hexadecimal digits.
std::string random_nonce();

}  // namespace nrl
