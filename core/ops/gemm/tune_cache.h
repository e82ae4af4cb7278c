#pragma once
// Timed choices of GEMM algorithms, kept between runs in a text file: a header that names library and GPU,
// then one line per plan.

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace nrl::ops::gemm {

class TuneCache {
 public:
  /// The library's own opaque description of an algorithm.
  using Algorithm = std::array<uint64_t, 8>;

  /// Reads `path` if it exists and begins with this `header` (library version and GPU); anything else in it
  /// is ignored and overwritten by the next store(). With an empty path nothing is saved.
  TuneCache(std::string path, std::string header);

  std::optional<Algorithm> find(const std::string& key) const;
  /// Adds an entry and rewrites the file atomically. Warns once if the file cannot be written.
  void store(const std::string& key, const Algorithm& algorithm);
  size_t size() const { return entries_.size(); }

 private:
  std::string path_, header_;
  std::map<std::string, Algorithm> entries_;
  bool warned_ = false;
};

}  // namespace nrl::ops::gemm
