#include "apps/profile/page_parts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <spdlog/fmt/fmt.h>

#include "apps/monitor/chart.h"
#include "apps/monitor/html.h"
#include "core/base/text.h"

namespace nrl::profile {
using monitor::html_escaped;

const std::string_view page_style = R"(h2 { font-size: 16px; margin: 28px 0 8px; }
p { margin: 6px 0; } .soft { color: var(--soft); } code { overflow-wrap: anywhere; }
.facts { display: flex; flex-wrap: wrap; gap: 8px 32px; margin: 12px 0; } .facts b { display: block; font-size: 20px; }
.findings li { margin: 8px 0; } .high { color: #d9541e; } .medium { color: #b8860b; } .low { color: var(--soft); }
.bars { display: grid; grid-template-columns: max-content minmax(0, 1fr) max-content; gap: 3px 12px; align-items: center; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 8px 0; }
.legend svg { width: 10px; height: 10px; margin-right: 6px; }
pre { overflow-x: auto; }
)";

std::string svg_ms(double seconds) {
  const double ms = seconds * 1e3;
  return std::abs(ms) < 1000 ? fmt::format("{:.3g} ms", ms) : fmt::format("{:.0f} ms", ms);
}

std::string svg_bytes(double bytes) {
  return human_bytes(static_cast<uint64_t>(std::max(0.0, bytes)));
}

std::string open_svg(double width, double height, std::string_view label) {
  return fmt::format("<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"{}\">\n", width, height,
                     html_escaped(label));
}

std::string time_axis(double seconds, double top, double bottom) {
  std::string s;
  if (!(seconds > 0)) return s;
  for (const double t : monitor::axis_ticks(0, seconds * 1e3, 8)) {
    if (t > seconds * 1e3) continue;
    const double x = svg_left + t * 1e-3 / seconds * (svg_width - svg_left - svg_right);
    s += fmt::format(
        "<path class=\"grid\" d=\"M{0:.1f} {1:.0f}V{2:.0f}\"/><text class=\"tick\" text-anchor=\"middle\" "
        "x=\"{0:.1f}\" y=\"{3:.0f}\">{4}</text>\n",
        x, top, bottom, bottom + 15, t < 1000 ? fmt::format("{:.4g} ms", t) : fmt::format("{:.0f} ms", t));
  }
  return s;
}

std::string legend_entry(std::string_view shape_class, std::string_view text) {
  return fmt::format(
      "<span><svg viewBox=\"0 0 10 10\"><rect class=\"{}\" width=\"10\" height=\"10\"/></svg>{}</span>\n",
      shape_class, html_escaped(text));
}

Table::Table(const std::vector<std::string_view>& headings) {
  html_ = "<table><tr>";
  for (const std::string_view h : headings) html_ += fmt::format("<th>{}</th>", h);
  html_ += "</tr>\n";
}

void Table::row(const std::vector<std::string>& cells) {
  html_ += "<tr>";
  for (const std::string& cell : cells) html_ += fmt::format("<td>{}</td>", html_escaped(cell));
  html_ += "</tr>\n";
}

}  // namespace nrl::profile
