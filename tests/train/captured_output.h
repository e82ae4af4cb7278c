#pragma once
// Standard output and standard error of the process, sent to files for a while.

#include <cstdio>
#include <string>

#include <fcntl.h>
#include <unistd.h>

namespace nrl::test {

class CapturedOutput {
 public:
  CapturedOutput(const std::string& out, const std::string& err) : kept_{::dup(1), ::dup(2)} {
    flush();
    redirect(1, out);
    redirect(2, err);
  }
  ~CapturedOutput() { restore(); }
  CapturedOutput(const CapturedOutput&) = delete;
  CapturedOutput& operator=(const CapturedOutput&) = delete;

  void restore() const {
    flush();
    for (int stream : {1, 2}) {
      int& kept = kept_[stream - 1];
      if (kept < 0) continue;
      ::dup2(kept, stream);
      ::close(kept);
      kept = -1;
    }
  }

 private:
  static void flush() {
    std::fflush(stdout);
    std::fflush(stderr);
  }
  static void redirect(int stream, const std::string& path) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    ::dup2(fd, stream);
    ::close(fd);
  }
  mutable int kept_[2];
};

}  // namespace nrl::test
