#pragma once
// Mode `big`: tensors with more elements than 32-bit indices can address, which no other case has.

#include <functional>
#include <string>
#include <vector>

#include "core/ops/exec.h"

namespace nrl::ops_test {

/// Inputs repeat after a few rows, and so must the results: those of every row are compared, bit by bit, with
/// a run on these few rows only. The period is odd, so that an index that wraps at a power of two reads or
/// writes another row.
struct BigCase {
  std::string name;
  size_t bytes_per_element = 0;  ///< memory of the case, per element of its largest results
  /// Runs it on tensors of at least `elements` elements in the memory of exec.device or, without one, of the
  /// host. Returns what differs; empty: nothing.
  std::function<std::string(ops::Exec& exec, int64_t elements)> run;
};
std::vector<BigCase> big_cases();

}  // namespace nrl::ops_test
