#include "core/io/append_file.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/error.h"

namespace nrl {

AppendFile::AppendFile(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) fail(Exit::cannot_create, "cannot open {} for writing: {}", path, std::strerror(errno));
  file_ = File(fd, path);
}

void AppendFile::append(std::string_view data) const {
  struct stat before = {};
  const bool known = ::fstat(file_.fd(), &before) == 0;
  std::string_view rest = data;
  while (!rest.empty()) {
    const ssize_t n = ::write(file_.fd(), rest.data(), rest.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int cause = errno;
      if (known && rest.size() < data.size()) {
        [[maybe_unused]] const int ignored = ::ftruncate(file_.fd(), before.st_size);
      }
      fail(Exit::io, "cannot write {}: {}", path(), std::strerror(cause));
    }
    rest.remove_prefix(static_cast<size_t>(n));
  }
}

void AppendFile::require_name() const {
  struct stat st = {};
  if (::fstat(file_.fd(), &st) == 0 && st.st_nlink == 0) fail(Exit::io, "{} was removed", path());
}

}  // namespace nrl
