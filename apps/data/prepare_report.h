#pragma once
// Progress output of `nrl-train prepare`.

#include <functional>
#include <string>
#include <string_view>

#include "apps/data/prepare.h"

namespace nrl::data {

/// "tokenizing: 34%, 1.2 GiB of 3.4 GiB, 45.0 MiB/s, 1m20s left, 300 M tokens"
std::string progress_text(const PrepareProgress& progress);

/// On a terminal one line that is redrawn; otherwise (`columns` 0) a plain line at the beginning of a phase
/// and every few seconds.
class PrepareReport {
 public:
  PrepareReport(int columns, std::function<void(std::string_view)> write)
      : columns_(columns), write_(std::move(write)) {}

  void operator()(const PrepareProgress& progress);
  /// Erases the redrawn line.
  void finish();

 private:
  int columns_;
  std::function<void(std::string_view)> write_;
  bool any_ = false;
  PrepareProgress::Phase phase_ = PrepareProgress::Phase::tokenizing;
  double next_ = 0;  // seconds in the phase
};

}  // namespace nrl::data
