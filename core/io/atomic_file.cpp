#include "core/io/atomic_file.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/status.h"

namespace nrl {
namespace {

std::atomic<FileOpHook> g_hook{nullptr};

// 0, or the errno value injected for this operation.
int injected(FileOp op, const std::string& path) {
  const FileOpHook hook = g_hook.load(std::memory_order_relaxed);
  return hook == nullptr ? 0 : hook(op, path);
}

std::string cause(int error) {
  // strerror(EFBIG) blames the file; name the limit.
  return error == EFBIG
             ? fmt::format("{} (the limit of ulimit -f, or of the file system)", std::strerror(error))
             : std::strerror(error);
}

// For operations on existing parent directories: a failure is a storage error.
void checked_call(FileOp op, const std::string& path, Exit code, const char* what,
                  int (*call)(const std::string&)) {
  int error = injected(op, path);
  if (error == 0 && call(path) != 0) error = errno;
  if (error != 0) fail(code, "{}: cannot {}: {}", path, what, cause(error));
}

}  // namespace

void set_file_op_hook(FileOpHook hook) {
  g_hook.store(hook);
}

File::File(File&& o) noexcept : fd_(std::exchange(o.fd_, -1)), path_(std::move(o.path_)) {}

File& File::operator=(File&& o) noexcept {
  if (this != &o) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = std::exchange(o.fd_, -1);
    path_ = std::move(o.path_);
  }
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

File File::open_read(const std::string& path, Links links) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer; it has no effect on regular files.
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | (links == Links::refuse ? O_NOFOLLOW : 0);
  int fd;
  do {
    fd = ::open(path.c_str(), flags);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) fail(Exit::no_input, "{}: cannot open: {}", path, cause(errno));
  File file(fd, path);
  struct stat st;
  if (::fstat(fd, &st) != 0) fail(Exit::io, "{}: cannot stat: {}", path, cause(errno));
  if (!S_ISREG(st.st_mode)) {
    fail(Exit::no_input, "{}: {} is not a regular file", path, S_ISDIR(st.st_mode) ? "a directory" : "this");
  }
  return file;
}

File File::create(const std::string& path) {
  int error = injected(FileOp::create, path);
  int fd = -1;
  if (error == 0) {
    do {
      fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) error = errno;
  }
  if (error != 0) fail(Exit::cannot_create, "{}: cannot create: {}", path, cause(error));
  return File(fd, path);
}

uint64_t File::size() const {
  struct stat st;
  if (::fstat(fd_, &st) != 0) fail(Exit::io, "{}: cannot stat: {}", path_, cause(errno));
  return static_cast<uint64_t>(st.st_size);
}

void File::pread_all(void* dst, size_t bytes, uint64_t offset) const {
  auto* p = static_cast<char*>(dst);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd_, p, bytes, static_cast<off_t>(offset));
    if (n < 0) {
      if (errno == EINTR) continue;
      fail(Exit::io, "{}: cannot read {} bytes at {}: {}", path_, bytes, offset, cause(errno));
    }
    if (n == 0)
      fail(Exit::data, "{}: the file ends at byte {}, {} more bytes are needed", path_, offset, bytes);
    status::made_progress();
    p += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
}

void File::pwrite_all(const void* src, size_t bytes, uint64_t offset) const {
  const auto* p = static_cast<const char*>(src);
  while (bytes > 0) {
    int error = injected(FileOp::write, path_);
    ssize_t n = -1;
    if (error == 0) {
      n = ::pwrite(fd_, p, bytes, static_cast<off_t>(offset));
      if (n < 0) error = errno;
      if (n == 0) error = ENOSPC;
    }
    if (error == EINTR) continue;
    if (error != 0) fail(Exit::io, "{}: cannot write {} bytes at {}: {}", path_, bytes, offset, cause(error));
    status::made_progress();
    p += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
}

void File::allocate(uint64_t bytes) const {
  if (bytes == 0) return;
  int error = injected(FileOp::allocate, path_);
  if (error == 0 && ::fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) != 0) error = errno;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG || error == EIO) {
    fail(Exit::io, "{}: cannot reserve {} bytes: {}", path_, bytes, cause(error));
  }
}

void File::truncate(uint64_t bytes) const {
  int error = injected(FileOp::truncate, path_);
  if (error == 0 && ::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) error = errno;
  if (error != 0) fail(Exit::io, "{}: cannot set the size to {} bytes: {}", path_, bytes, cause(error));
}

void File::sync() const {
  int error = injected(FileOp::fsync, path_);
  if (error == 0 && ::fsync(fd_) != 0) error = errno;
  if (error != 0) fail(Exit::io, "{}: cannot fsync, the file is given up: {}", path_, cause(error));
}

void File::touch() const {
  int error = injected(FileOp::touch, path_);
  if (error == 0 && ::futimens(fd_, nullptr) != 0) error = errno;
  if (error != 0) fail(Exit::io, "{}: cannot set its time: {}", path_, cause(error));
}

void File::close() {
  if (fd_ < 0) return;
  const int rc = ::close(std::exchange(fd_, -1));
  if (rc != 0 && errno != EINTR) fail(Exit::io, "{}: cannot close: {}", path_, cause(errno));
}

std::string read_file(const std::string& path, uint64_t max_bytes, File::Links links) {
  const File file = File::open_read(path, links);
  const uint64_t size = file.size();
  if (size > max_bytes)
    fail(Exit::data, "{}: {} bytes, more than the {} that are read", path, size, max_bytes);
  std::string text(size, '\0');
  file.pread_all(text.data(), size, 0);
  return text;
}

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)), temporary_(path_ + ".tmp-" + random_nonce()), file_(File::create(temporary_)) {}

AtomicFile::~AtomicFile() {
  if (file_.is_open()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::string_view data) {
  file_.pwrite_all(data.data(), data.size(), size_);
  size_ += data.size();
}

void AtomicFile::commit(Durable durable) {
  if (durable == Durable::yes) file_.sync();
  rename_path(temporary_, path_);
  file_.close();
  if (durable == Durable::yes) fsync_directory(parent_path(path_));
}

void write_file_atomic(const std::string& path, std::string_view text, Durable durable) {
  AtomicFile file(path);
  file.write(text);
  file.commit(durable);
}

void fsync_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail(Exit::io, "{}: cannot open the directory: {}", path, cause(errno));
  const File directory(fd, path);
  int error = injected(FileOp::fsync, path);
  if (error == 0 && ::fsync(fd) != 0) error = errno;
  if (error == EINVAL) return;  // a file system without directory sync
  if (error != 0) fail(Exit::io, "{}: cannot fsync the directory: {}", path, cause(error));
}

void make_directory(const std::string& path) {
  checked_call(FileOp::make_directory, path, Exit::cannot_create, "create the directory",
               [](const std::string& p) { return ::mkdir(p.c_str(), 0755); });
}

void make_directories(const std::string& path) {
  if (path.empty() || is_directory(path)) return;
  const std::string parent = parent_path(path);
  if (parent != path) make_directories(parent);
  int error = injected(FileOp::make_directory, path);
  if (error == 0 && ::mkdir(path.c_str(), 0755) != 0) error = errno;
  if (error != 0 && !(error == EEXIST && is_directory(path))) {
    fail(Exit::cannot_create, "{}: cannot create the directory: {}", path, cause(error));
  }
  if (error == 0) fsync_directory(parent);
}

void rename_path(const std::string& from, const std::string& to) {
  int error = injected(FileOp::rename, from);
  if (error == 0 && ::rename(from.c_str(), to.c_str()) != 0) error = errno;
  if (error != 0) fail(Exit::io, "{}: cannot rename to {}: {}", from, to, cause(error));
}

bool exchange_paths(const std::string& a, const std::string& b) {
  int error = injected(FileOp::rename, a);
  if (error == 0 &&
      ::syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) != 0) {
    error = errno;
  }
  if (error == EINVAL || error == ENOSYS || error == EOPNOTSUPP) return false;
  if (error != 0) fail(Exit::io, "{}: cannot swap with {}: {}", a, b, cause(error));
  return true;
}

void remove_tree(const std::string& path) {
  struct stat st;
  if (::lstat(path.c_str(), &st) != 0) {
    if (errno == ENOENT) return;
    fail(Exit::io, "{}: cannot stat: {}", path, cause(errno));
  }
  if (S_ISDIR(st.st_mode)) {
    for (const std::string& name : list_directory(path)) remove_tree(join_path(path, name));
  }
  // remove() is unlink or rmdir, and never follows a link.
  checked_call(FileOp::remove, path, Exit::io, "remove", [](const std::string& p) {
    const int rc = std::remove(p.c_str());
    return rc != 0 && errno == ENOENT ? 0 : rc;
  });
}

std::vector<std::string> list_directory(const std::string& path) {
  DIR* dir = ::opendir(path.c_str());
  if (dir == nullptr) fail(Exit::no_input, "{}: cannot read the directory: {}", path, cause(errno));
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(dir)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  const int error = errno;
  ::closedir(dir);
  if (error != 0) fail(Exit::io, "{}: cannot read the directory: {}", path, cause(error));
  std::sort(names.begin(), names.end());
  return names;
}

bool path_exists(const std::string& path) {
  struct stat st;
  return ::lstat(path.c_str(), &st) == 0;
}

bool is_directory(const std::string& path) {
  struct stat st;
  return ::stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode);
}

bool same_directory(const std::string& a, const std::string& b) {
  struct stat x, y;
  return ::stat(a.c_str(), &x) == 0 && ::stat(b.c_str(), &y) == 0 && S_ISDIR(x.st_mode) &&
         x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

std::string join_path(std::string_view dir, std::string_view name) {
  std::string path(dir);
  if (!path.empty() && path.back() != '/') path += '/';
  return path.append(name);
}

std::string parent_path(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return path.empty() ? "." : "/";
  const size_t slash = path.rfind('/', end);
  if (slash == std::string::npos) return ".";
  const size_t last = path.find_last_not_of('/', slash);
  return last == std::string::npos ? "/" : path.substr(0, last + 1);
}

bool is_plain_name(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
         name.find('/') == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

std::string random_nonce() {
  uint64_t bits = 0;
  ssize_t n;
  do {
    n = ::getrandom(&bits, sizeof bits, 0);
  } while (n < 0 && errno == EINTR);
  if (n != static_cast<ssize_t>(sizeof bits)) fail(Exit::internal, "getrandom failed: {}", cause(errno));
  return fmt::format("{:016x}", bits);
}

bool has_nonce(std::string_view name, std::string_view stem) {
  if (!name.starts_with(stem) || name.size() != stem.size() + 16) return false;
  name.remove_prefix(stem.size());
  return name.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace nrl
