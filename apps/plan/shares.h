#pragma once
// Shares in the writing of what several ranks hold: a pure function of sizes, so that plan, snapshot and
// files of a checkpoint agree without communication.

#include <cstdint>
#include <vector>

namespace nrl::plan {

struct Shares {
  std::vector<int> thing;    ///< by thing: the rank that writes it
  std::vector<int64_t> end;  ///< by rank: it writes the elements from the end of the rank before
};

/// Divides things of these sizes, in bytes, and `elements` of `element_bytes` bytes each among `holders`
/// ranks that have all of them, in about equal parts of at least `least` bytes: ranks beyond those write
/// nothing. Ranks that write are spread evenly, and with it over the hosts; rank 0 is one. Ends but the last
/// are multiples of `unit`.
Shares divide(const std::vector<int64_t>& things, int64_t elements, int64_t element_bytes, int holders,
              int64_t least, int64_t unit);

}  // namespace nrl::plan
