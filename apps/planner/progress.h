#pragma once
// Progress output of `nrl-train plan --search`.

#include <cstddef>
#include <functional>
#include <string_view>
#include <utility>

namespace nrl::planner {

/// Prints nothing in the first second. Then on a terminal one line that is redrawn; otherwise (`columns` 0) a
/// plain line every few seconds.
class SearchProgress {
 public:
  SearchProgress(int columns, std::function<void(std::string_view)> write)
      : columns_(columns), write_(std::move(write)) {}

  /// `done` of `total` grids have been planned, `seconds` after the start.
  void operator()(size_t done, size_t total, double seconds);
  /// Erases the redrawn line.
  void finish();

 private:
  int columns_;
  std::function<void(std::string_view)> write_;
  bool shown_ = false;
  double next_ = 1;  // seconds after the start
};

}  // namespace nrl::planner
