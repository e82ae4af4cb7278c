#pragma once
// Choices of GEMM algorithms that were timed, kept between runs in a text file per GPU and library version:
//
//   nrl-gemm-tuning 2
//   gpu NVIDIA H200
//   library cuBLASLt 13.1.0
//   KEY W W W W W W W W        one line per plan: GemmPlan::key() and eight hexadecimal words

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace nrl::ops::gemm {

/// Choices are valid for one GPU model and one library version.
struct TuneTarget {
  std::string gpu;      ///< "NVIDIA H200"
  std::string library;  ///< "cuBLASLt 13.1.0"

  /// "NVIDIA-H200_cuBLASLt-13.1.0.txt": the file of this target in a directory.
  std::string file_name() const;
};

class TuneCache {
 public:
  /// The library's own opaque description of an algorithm.
  using Algorithm = std::array<uint64_t, 8>;
  enum class Access : uint8_t {
    read,    ///< the file must exist; store() is not allowed
    extend,  ///< the file may exist, and store() rewrites it
  };

  /// `path`: a file (*.txt) or a directory that has one per target; empty: nothing is read or saved.
  /// Exit::no_input when a file to read is missing, Exit::data, with file and line, when it is malformed or
  /// of another target.
  TuneCache(const std::string& path, TuneTarget target, Access access);

  std::optional<Algorithm> find(const std::string& key) const;
  /// Adds or replaces an entry and rewrites the file atomically, creating its directory. Warns once if the
  /// file cannot be written.
  void store(const std::string& key, const Algorithm& algorithm);
  size_t size() const { return entries_.size(); }
  const std::string& file() const { return file_; }

 private:
  void read(Access access);
  bool write() const;

  std::string file_;
  TuneTarget target_;
  Access access_;
  std::map<std::string, Algorithm> entries_;
  bool warned_ = false;
};

}  // namespace nrl::ops::gemm
