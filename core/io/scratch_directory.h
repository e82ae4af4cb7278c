#pragma once
// A directory for files that must not outlive the process.

#include <string>
#include <string_view>

namespace nrl {

/// $TMPDIR, else /tmp.
std::string scratch_parent();

/// Removed with its contents by the destructor, or, if a signal or an abort ends the process before, by a
/// small helper process in a session of its own.
class ScratchDirectory {
 public:
  /// Creates PARENT/PREFIX and a nonce. Exit::cannot_create.
  ScratchDirectory(const std::string& parent, std::string_view prefix);
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  ~ScratchDirectory();

  const std::string& path() const { return path_; }

 private:
  void start_helper();

  std::string path_;
  int alive_ = -1;  // the helper sees the other end of this pipe closed when this process ends
};

}  // namespace nrl
