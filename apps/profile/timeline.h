#pragma once
// One step of one rank, reduced to what a page can draw.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "apps/profile/recorded.h"
#include "core/io/json.h"

namespace nrl::profile {

/// The color of a bar on the page; the same colors as in Nsight Systems.
enum class Paint : uint8_t {
  gemm,
  attention,
  memory_bound,
  recompute,
  communication,
  wait,
  message,
  copy,
  data,
  optimizer,
  phase,
};
struct PaintStyle {
  std::string_view name, color;
};
inline constexpr std::array<PaintStyle, 11> paints{{{"GEMM", "#76b900"},
                                                    {"attention", "#2a78d6"},
                                                    {"memory-bound", "#9aa6b2"},
                                                    {"recompute", "#b8860b"},
                                                    {"communication", "#d9541e"},
                                                    {"wait", "#c0356f"},
                                                    {"message", "#a04fc4"},
                                                    {"copy", "#7a7a1a"},
                                                    {"data", "#1a9a6c"},
                                                    {"optimizer", "#4b6b7a"},
                                                    {"phase", "#7f8c99"}}};

/// A range, or `count` neighbors that are too short to be drawn alone: then `name` is the longest one's.
struct Bar {
  double begin = 0, end = 0;  ///< seconds from the begin of the step
  Paint paint = Paint::phase;
  std::string name;
  int64_t count = 1;
};

struct Lane {
  std::string name;
  std::vector<Bar> bars;  ///< disjoint, by begin
};

struct Timeline {
  int rank = 0;
  int64_t step = 0;
  double seconds = 0;  ///< of the step
  std::vector<Lane> lanes;
};

inline constexpr size_t most_bars = 4000;

/// The step of median duration: phases, the compute row, waiting of the main thread, and a lane for each
/// concurrent operation of each group. At most `most` bars, which must be 1,000 or more. Empty without steps.
Timeline timeline_of(const Recorded& recorded, size_t most = most_bars);

/// For the way from the rank that is shown to the one that writes the page. `timeline_from` checks all values
/// and fails with Exit::data.
JsonValue to_json(const Timeline& timeline);
Timeline timeline_from(const JsonValue& json);

}  // namespace nrl::profile
