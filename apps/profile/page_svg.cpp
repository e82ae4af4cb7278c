#include "apps/profile/page_svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include <spdlog/fmt/fmt.h>

#include "apps/monitor/chart.h"
#include "apps/monitor/html.h"
#include "apps/profile/lifetimes.h"
#include "apps/profile/page_parts.h"
#include "core/base/text.h"
#include "memory/plan.h"

namespace nrl::profile {
namespace {

using monitor::axis_ticks;
using monitor::html_escaped;

constexpr std::array<std::string_view, 13> part_colors{"#76b900", "#4b6b7a", "#b8860b", "#c0356f", "#d9541e",
                                                       "#a04fc4", "#6a3d9a", "#7a7a1a", "#1a9a6c", "#5c6bc0",
                                                       "#8fa8d8", "#9aa6b2", "#c9ced4"};
static_assert(part_colors.size() == split_parts.size());
constexpr std::array<std::string_view, memory::category_count> category_colors{
    "#2a78d6", "#d9541e", "#4b6b7a", "#76b900", "#9aa6b2", "#1a9a6c"};

}  // namespace

std::string svg_style() {
  std::string css;
  for (size_t i = 0; i < paints.size(); ++i) css += fmt::format(".p{} {{ fill: {}; }} ", i, paints[i].color);
  css += '\n';
  for (size_t i = 0; i < part_colors.size(); ++i)
    css += fmt::format(".s{} {{ fill: {}; }} ", i, part_colors[i]);
  css += '\n';
  for (size_t i = 0; i < category_colors.size(); ++i)
    css += fmt::format(".c{} {{ fill: {}; }} ", i, category_colors[i]);
  return css +
         "\n.wide { overflow-x: auto; } .wide svg { min-width: 760px; } .bar svg { height: 18px; display: "
         "block; }\n"
         ".name { font-size: 12px; fill: var(--text); } .roof { fill: none; stroke: var(--soft); }\n"
         ".life { stroke: var(--page); stroke-width: 0.5; } .point { fill-opacity: 0.75; }\n"
         ".peak { stroke: var(--text); stroke-dasharray: 4 3; }\n";
}

std::string parts_svg(std::span<const BarPart> parts, double whole, double longest) {
  std::string s =
      "<svg viewBox=\"0 0 1000 18\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"split\">";
  double x = 0;
  for (const BarPart& part : parts) {
    if (!(part.seconds > 0) || !(longest > 0)) continue;
    const double width = part.seconds / longest * 1000;
    s += fmt::format(
        "<rect class=\"s{}\" x=\"{:.2f}\" y=\"0\" width=\"{:.2f}\" height=\"18\"><title>{} {}, {:.1f} % of "
        "the step</title></rect>",
        part.color, x, width, part.name, svg_ms(part.seconds), whole > 0 ? part.seconds / whole * 100 : 0);
    x += width;
  }
  return s + "</svg>";
}

std::string split_svg(const Split& split, double longest) {
  std::vector<BarPart> parts;
  for (size_t i = 0; i < split_parts.size(); ++i)
    parts.push_back({static_cast<int>(i), split_parts[i].first, split.*split_parts[i].second});
  return parts_svg(parts, split.wall, longest);
}

std::string timeline_svg(const Timeline& timeline) {
  if (timeline.lanes.empty() || !(timeline.seconds > 0)) return "";
  constexpr double lane_height = 24, top = 6;
  const double bottom = top + lane_height * static_cast<double>(timeline.lanes.size());
  const double scale = (svg_width - svg_left - svg_right) / timeline.seconds;
  std::string s = open_svg(svg_width, bottom + 22,
                           fmt::format("timeline of step {} of rank {}", timeline.step, timeline.rank));
  s += time_axis(timeline.seconds, top, bottom);
  double y = top;
  for (const Lane& lane : timeline.lanes) {
    s += fmt::format("<text class=\"name\" x=\"0\" y=\"{:.0f}\">{}</text>\n", y + 16,
                     html_escaped(clipped(lane.name, 20)));
    for (const Bar& bar : lane.bars) {
      const std::string others = bar.count > 1 ? fmt::format(" and {} more", bar.count - 1) : "";
      s += fmt::format(
          "<rect class=\"p{}\" x=\"{:.2f}\" y=\"{:.0f}\" width=\"{:.2f}\" height=\"{:.0f}\"><title>{}{}: {} "
          "at "
          "{}</title></rect>\n",
          static_cast<int>(bar.paint), svg_left + bar.begin * scale, y + 2,
          std::max(0.3, (bar.end - bar.begin) * scale), lane_height - 4, html_escaped(bar.name), others,
          svg_ms(bar.end - bar.begin), svg_ms(bar.begin));
    }
    y += lane_height;
  }
  return s + "</svg>\n";
}

std::string roofline_svg(std::span<const Operation> operations) {
  struct Point {
    const Operation* operation;
    double x, y;  // FLOPs per byte, FLOP/s
  };
  std::vector<Point> points;
  double peak = 0, copy = 0, longest = 0;
  for (const Operation& o : operations) {
    if (o.attainable > 0 && o.bound == Bound::arithmetic) peak = std::max(peak, o.flops / o.attainable);
    if (o.attainable > 0 && o.bound == Bound::memory) copy = std::max(copy, o.bytes / o.attainable);
    if (!(o.flops > 0) || !(o.bytes > 0) || !(o.seconds > 0)) continue;
    points.push_back({&o, o.flops / o.bytes, o.flops / o.seconds});
    longest = std::max(longest, o.seconds);
  }
  if (points.empty()) return "";
  double x_low = 1, x_high = 1, y_low = peak > 0 ? peak : points[0].y, y_high = y_low;
  for (const Point& p : points) {
    x_low = std::min(x_low, p.x), x_high = std::max(x_high, p.x);
    y_low = std::min(y_low, p.y), y_high = std::max(y_high, p.y);
  }
  // Whole decades, with the ridge of both ceilings in view.
  if (peak > 0 && copy > 0) x_low = std::min(x_low, peak / copy), x_high = std::max(x_high, peak / copy);
  x_low /= 2;  // no point lies on an axis
  y_low /= 2;
  const double x0 = std::floor(std::log10(x_low)), x1 = std::floor(std::log10(x_high)) + 1;
  const double y0 = std::floor(std::log10(y_low)), y1 = std::floor(std::log10(y_high)) + 1;
  constexpr double width = 760, height = 380, start = 84, top = 10, bottom = 44;
  const auto px = [&](double x) { return start + (std::log10(x) - x0) / (x1 - x0) * (width - start - 12); };
  const auto py = [&](double y) {
    return height - bottom - (std::log10(y) - y0) / (y1 - y0) * (height - top - bottom);
  };
  std::string s = open_svg(width, height, "roofline");
  for (double d = x0; d <= x1; ++d)
    s += fmt::format(
        "<path class=\"grid\" d=\"M{0:.1f} {1:.0f}V{2:.0f}\"/><text class=\"tick\" text-anchor=\"middle\" "
        "x=\"{0:.1f}\" y=\"{3:.0f}\">{4:.4g}</text>\n",
        px(std::pow(10, d)), top, height - bottom, height - bottom + 16, std::pow(10, d));
  for (double d = y0; d <= y1; ++d)
    s += fmt::format(
        "<path class=\"grid\" d=\"M{0:.0f} {1:.1f}H{2:.0f}\"/><text class=\"tick\" text-anchor=\"end\" "
        "x=\"{3:.0f}\" "
        "y=\"{4:.1f}\">{5:.4g} GF/s</text>\n",
        start, py(std::pow(10, d)), width - 12, start - 6, py(std::pow(10, d)) + 4, std::pow(10, d - 9));
  s += fmt::format(
      "<text class=\"tick\" text-anchor=\"middle\" x=\"{:.0f}\" y=\"{:.0f}\">FLOPs per byte</text>\n",
      (start + width) / 2, height - 10);
  const double left_x = std::pow(10, x0), right_x = std::pow(10, x1);
  if (copy > 0) {
    const double from = std::max(left_x, std::pow(10, y0) / copy);
    const double to = std::min(right_x, (peak > 0 ? peak : std::pow(10, y1)) / copy);
    if (from < to)
      s += fmt::format(
          "<path class=\"roof\" d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\"><title>memory: {:.3g} "
          "GB/s</title></path>\n",
          px(from), py(from * copy), px(to), py(to * copy), copy * 1e-9);
  }
  if (peak > 0)
    s += fmt::format(
        "<path class=\"roof\" d=\"M{:.1f} {:.1f}H{:.1f}\"><title>arithmetic: {:.4g} GFLOP/s</title></path>\n",
        px(copy > 0 ? std::clamp(peak / copy, left_x, right_x) : left_x), py(peak), px(right_x), peak * 1e-9);
  for (const Point& p : points)
    s += fmt::format(
        "<circle class=\"point p{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\"><title>{}, {}: {:.3g} GFLOP/s, "
        "{:.3g} "
        "FLOPs per byte, {:.0f} % of attainable</title></circle>\n",
        static_cast<int>(p.operation->bound == Bound::arithmetic ? Paint::gemm : Paint::attention), px(p.x),
        py(p.y), 4 + 8 * std::sqrt(p.operation->seconds / longest), html_escaped(p.operation->name),
        html_escaped(p.operation->part), p.y * 1e-9, p.x,
        p.operation->attainable / p.operation->seconds * 100);
  return s + "</svg>\n";
}

std::string memory_svg(const MemoryUse& memory, double seconds) {
  if (memory.curve.empty() || !(seconds > 0)) return "";
  constexpr double height = 260, top = 8, bottom = 230;
  const double most = static_cast<double>(std::max<int64_t>({memory.arena, memory.peak, 1}));
  const auto px = [&](double t) {
    return svg_left + std::clamp(t / seconds, 0.0, 1.0) * (svg_width - svg_left - svg_right);
  };
  const auto py = [&](double bytes) { return bottom - bytes / most * (bottom - top); };
  std::string s = open_svg(svg_width, height, "live memory");
  for (const double share : {0.0, 0.25, 0.5, 0.75, 1.0})
    s += fmt::format(
        "<path class=\"grid\" d=\"M{0:.0f} {1:.1f}H{2:.0f}\"/><text class=\"tick\" text-anchor=\"end\" "
        "x=\"{3:.0f}\" "
        "y=\"{4:.1f}\">{5}</text>\n",
        svg_left, py(share * most), svg_width - svg_right, svg_left - 6, py(share * most) + 4,
        svg_bytes(share * most));
  // At most one point per half pixel; the largest total of those at one place.
  using Values = std::array<int64_t, memory::category_count>;
  const auto total = [](const Values& v) {
    int64_t sum = 0;
    for (const int64_t bytes : v) sum += bytes;
    return sum;
  };
  std::vector<std::pair<double, Values>> points;
  for (const auto& [time, values] : memory.curve) {
    const double x = px(time);
    if (!points.empty() && x - points.back().first < 0.5) {
      if (total(values) > total(points.back().second)) points.back().second = values;
    } else {
      points.emplace_back(x, values);
    }
  }
  std::vector<double> below(points.size(), 0);
  for (int c = 0; c < memory::category_count; ++c) {
    std::string up, down;
    int64_t largest = 0;
    for (size_t i = 0; i < points.size(); ++i) {
      const double next = i + 1 < points.size() ? points[i + 1].first : svg_width - svg_right;
      const double low = below[i], high = low + static_cast<double>(points[i].second[c]);
      up += fmt::format("{}{:.1f} {:.1f}H{:.1f}", i ? "L" : "M", points[i].first, py(high), next);
      down.insert(0, fmt::format("L{:.1f} {:.1f}H{:.1f}", next, py(low), points[i].first));
      largest = std::max(largest, points[i].second[c]);
      below[i] = high;
    }
    if (largest == 0) continue;
    s += fmt::format("<path class=\"c{}\" d=\"{}{}Z\"><title>{}: at most {}</title></path>\n", c, up, down,
                     memory::name_of(static_cast<memory::Category>(c)),
                     svg_bytes(static_cast<double>(largest)));
  }
  s += fmt::format(
      "<path class=\"peak\" d=\"M{0:.1f} {1:.0f}V{2:.0f}\"><title>peak: {3} at {4}</title></path>\n",
      px(memory.peak_at), top, bottom, svg_bytes(static_cast<double>(memory.peak)), svg_ms(memory.peak_at));
  return s + time_axis(seconds, bottom, bottom) + "</svg>\n";
}

std::string arena_svg(const Recorded& recorded, size_t most) {
  if (recorded.step_begins.size() < 2 || recorded.arena_bytes <= 0) return "";
  const int64_t begin = recorded.step_begins[0], end = recorded.step_begins[1];
  const double seconds = static_cast<double>(end - begin) * 1e-9;
  std::vector<uint32_t> largest(recorded.buffers.size());
  for (uint32_t i = 0; i < largest.size(); ++i) largest[i] = i;
  std::stable_sort(largest.begin(), largest.end(), [&](uint32_t a, uint32_t b) {
    return recorded.buffers[a].bytes > recorded.buffers[b].bytes;
  });
  if (largest.size() > most) largest.resize(most);
  std::sort(largest.begin(), largest.end());
  constexpr double height = 640, top = 8, bottom = 600;
  const auto arena = static_cast<double>(recorded.arena_bytes);
  const auto px = [&](int64_t t) {
    return svg_left + static_cast<double>(t - begin) /
                          static_cast<double>(std::max<int64_t>(1, end - begin)) *
                          (svg_width - svg_left - svg_right);
  };
  const auto py = [&](double offset) { return bottom - offset / arena * (bottom - top); };
  std::string s = open_svg(svg_width, height, "arena over time");
  for (const double share : {0.0, 0.25, 0.5, 0.75, 1.0})
    s += fmt::format(
        "<path class=\"grid\" d=\"M{0:.0f} {1:.1f}H{2:.0f}\"/><text class=\"tick\" text-anchor=\"end\" "
        "x=\"{3:.0f}\" "
        "y=\"{4:.1f}\">{5}</text>\n",
        svg_left, py(share * arena), svg_width - svg_right, svg_left - 6, py(share * arena) + 4,
        svg_bytes(share * arena));
  for (const LiveRange& range : live_ranges(recorded, recorded.first_step)) {
    if (!std::binary_search(largest.begin(), largest.end(), range.buffer)) continue;
    const memory::MemoryPlan::Buffer& buffer = recorded.buffers[range.buffer];
    const double high = py(static_cast<double>(buffer.offset + buffer.bytes));
    s += fmt::format(
        "<rect class=\"life c{}\" x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\"><title>{}: {} "
        "at "
        "offset {}, {} to {}</title></rect>\n",
        static_cast<int>(buffer.category), px(range.begin), high,
        std::max(0.3, px(range.end) - px(range.begin)), py(static_cast<double>(buffer.offset)) - high,
        html_escaped(buffer.name), svg_bytes(static_cast<double>(buffer.bytes)), buffer.offset,
        svg_ms(static_cast<double>(range.begin - begin) * 1e-9),
        svg_ms(static_cast<double>(range.end - begin) * 1e-9));
  }
  return s + time_axis(seconds, bottom, bottom) + "</svg>\n";
}

}  // namespace nrl::profile
