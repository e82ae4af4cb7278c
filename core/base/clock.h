#pragma once

#include <chrono>

namespace nrl {

/// Time in seconds on a clock that never goes back. Its zero has no meaning.
inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace nrl
