#pragma once
// A sequence of numbers that grows beyond memory.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/io/atomic_file.h"

namespace nrl::data {

/// Numbers of one type T, of which the last ones are in memory and the others in a file without a name, which
/// disappears with the process. Not thread-safe. Throws Error (`io`, `cannot_create`).
template <class T>
class Spool {
 public:
  /// `path`: the file gets a name that begins with it, like an AtomicFile for it.
  explicit Spool(std::string path) : path_(std::move(path)) {}

  int64_t size() const { return static_cast<int64_t>(written_ + memory_.size()); }

  void add(const T& value) {
    if (memory_.size() == block) spill();
    memory_.push_back(value);
  }

  /// Calls `take` with all numbers in order, a block at a time.
  void read(const std::function<void(std::span<const T>)>& take) const {
    std::vector<T> values(written_ > 0 ? block : 0);
    for (size_t at = 0; at < written_; at += block) {
      file_.pread_all(values.data(), block * sizeof(T), at * sizeof(T));
      take(values);
    }
    if (!memory_.empty()) take(memory_);
  }

 private:
  static constexpr size_t block = (size_t{1} << 20) / sizeof(T);

  void spill() {
    if (!file_.is_open()) {
      file_ = File::create(path_ + ".tmp-" + random_nonce());
      remove_tree(file_.path());
    }
    file_.pwrite_all(memory_.data(), block * sizeof(T), written_ * sizeof(T));
    written_ += block;
    memory_.clear();
  }

  std::string path_;
  File file_;
  size_t written_ = 0;
  std::vector<T> memory_;
};

}  // namespace nrl::data
