#pragma once
// Shared by the host and device timelines: whether ranges are recorded, and their totals.

#include <atomic>
#include <cstdint>
#include <string>

namespace nrl::trace {

namespace detail {
inline constexpr unsigned record_bit = 1, nvtx_bit = 2, nesting_bit = 4;
extern std::atomic<unsigned> enabled;  // the bits above
}  // namespace detail

struct Total {
  std::string name;
  std::string parent;  ///< name of the innermost range around; empty where totals are by name alone
  int64_t count = 0;
  double seconds = 0;
};

}  // namespace nrl::trace
