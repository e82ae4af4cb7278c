#pragma once
// The drawings of the page of a profile. Colors of text and lines follow the style of apps/monitor/html.h;
// every shape has a title that a browser shows under the pointer.

#include <span>
#include <string>
#include <string_view>

#include "apps/profile/profile.h"
#include "apps/profile/recorded.h"
#include "apps/profile/timeline.h"

namespace nrl::profile {

/// The rules of CSS that the drawings need besides the common style.
std::string svg_style();

/// A part of a stacked bar, in the color of the part of a Split with this index.
struct BarPart {
  int color = 0;
  std::string_view name;
  double seconds = 0;
};
/// One stacked bar of parts of a step of `whole` seconds, as wide as they are of `longest` seconds.
std::string parts_svg(std::span<const BarPart> parts, double whole, double longest);

/// One stacked bar of the parts of a step, as wide as its wall time is of `longest` seconds.
std::string split_svg(const Split& split, double longest);

/// One row per lane.
std::string timeline_svg(const Timeline& timeline);

/// Speed over FLOPs per byte on logarithmic axes, a point per operation that has FLOPs, with the ceilings
/// that Operation::attainable implies. Empty without such operations.
std::string roofline_svg(std::span<const Operation> operations);

/// Live bytes by category over a step of `seconds`. Empty without a curve.
std::string memory_svg(const MemoryUse& memory, double seconds);

/// The arena over time: lifetimes of the `most` largest buffers in the first step of the window, at their
/// offsets.
std::string arena_svg(const Recorded& recorded, size_t most);

}  // namespace nrl::profile
