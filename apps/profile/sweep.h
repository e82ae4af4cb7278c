#pragma once
// A window's rows of nested ranges, flattened: every instant belongs to its innermost range.

#include <cstdint>
#include <string_view>
#include <vector>

#include "apps/profile/recorded.h"

namespace nrl::profile {

/// A stretch of time of a row in which one range is the innermost one. Nanoseconds.
struct Piece {
  int64_t begin = 0, end = 0;
  int32_t event = -1;  ///< index for Window::events; -1: in no range
};

/// The ranges of a window by row, cut to its steps. A range that ends after the one around
/// it is cut, too.
class Rows {
 public:
  /// `recorded` must outlive this.
  explicit Rows(const Recorded& recorded);

  int64_t begin() const { return recorded_.step_begins.front(); }
  int64_t end() const { return recorded_.step_begins.back(); }

  /// Pieces of a row in order; they cover all steps without gaps.
  std::vector<Piece> flatten(uint16_t row) const;

  /// Where a call of an op was issued.
  struct Place {
    bool update = false, recompute = false;  ///< within the optimizer step; within a range `recompute`
    std::string_view range = {};             ///< as Call::range of a dry run
  };
  /// For a call on a device, by the ranges of the thread that issued it.
  Place place(int32_t event) const;
  /// When a call on a device was issued, nanoseconds; 0: unknown.
  int64_t issued(int32_t event) const;

 private:
  const trace::Event& event(int32_t index) const { return recorded_.window.events[index]; }
  int32_t host_event(int32_t event) const;

  const Recorded& recorded_;
  std::vector<int32_t> parents_, host_of_call_;
};

}  // namespace nrl::profile
