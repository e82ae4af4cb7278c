#pragma once
// A file that grows by whole pieces, for logs that other programs read while they are written.

#include <string>
#include <string_view>

#include "core/io/atomic_file.h"

namespace nrl {

class AppendFile {
 public:
  AppendFile() = default;  ///< none
  /// Opens `path` for appending (O_APPEND, mode 0644 & ~umask), creating it if it is missing.
  /// Exit::cannot_create.
  explicit AppendFile(const std::string& path);

  bool is_open() const { return file_.is_open(); }
  const std::string& path() const { return file_.path(); }
  /// Appends `data`, with one write(2) if the system takes it whole. If it does not (Exit::io), the part that
  /// was written is removed again.
  void append(std::string_view data) const;
  /// Exit::io if the file has lost its last name: appended data would vanish silently.
  void require_name() const;

 private:
  File file_;
};

}  // namespace nrl
