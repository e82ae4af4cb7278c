#include "apps/monitor/chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <spdlog/fmt/fmt.h>

#include "apps/monitor/format.h"
#include "apps/monitor/html.h"
#include "core/base/text.h"

namespace nrl::monitor {
namespace {

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  void add(double v) {
    low = std::min(low, v);
    high = std::max(high, v);
  }
  bool empty() const { return low > high; }
  // Gives a constant curve a margin.
  void add_margin() {
    if (high > low) return;
    const double margin = high == 0 ? 1 : std::abs(high) * 0.05;
    low -= margin;
    high += margin;
  }
};

Range steps_of(std::span<const RunHistory> runs, Curve RunHistory::*curve) {
  Range r;
  for (const RunHistory& run : runs)
    for (const CurvePoint& p : (run.*curve).points) r.add(static_cast<double>(p.step));
  return r;
}

constexpr const char* marks = "*o+x#@%&";

struct TableRow {
  std::string run, steps, tokens;
  std::string first_loss = "-", last_loss = "-", best_val = "-", rate = "-";
};

TableRow row_of(const RunHistory& r) {
  TableRow row{
      .run = r.name, .steps = grouped(r.last_step), .tokens = human_count(static_cast<double>(r.tokens))};
  if (!r.loss.points.empty()) {
    row.first_loss = decimal(r.loss.points.front().value, 4);
    row.last_loss = decimal(r.loss.tail_mean(10), 4);
  }
  if (!r.val_loss.points.empty()) {
    const auto best = std::min_element(r.val_loss.points.begin(), r.val_loss.points.end(),
                                       [](const auto& a, const auto& b) { return a.value < b.value; });
    row.best_val = fmt::format("{} at {}", decimal(best->value, 4), grouped(best->step));
  }
  if (!r.tokens_per_s.points.empty()) row.rate = compact_count(r.tokens_per_s.median());
  return row;
}

constexpr std::string_view headings[] = {"run",           "steps",         "tokens",         "first loss",
                                         "last 10 steps", "best val loss", "median tokens/s"};

std::vector<std::string> cells_of(const TableRow& r) {
  return {r.run, r.steps, r.tokens, r.first_loss, r.last_loss, r.best_val, r.rate};
}

// --- SVG

constexpr const char* colors[] = {"#2a78d6", "#d9541e", "#1a9a6c", "#a04fc4",
                                  "#b8860b", "#c0356f", "#4b6b7a", "#7a7a1a"};
constexpr int panel_width = 560, panel_height = 280, left = 64, right = 24, top = 30, bottom = 34;

const char* color_of(size_t run) {
  return colors[run % std::size(colors)];
}

std::string panel(std::span<const RunHistory> runs, Curve RunHistory::*curve, Curve RunHistory::*points,
                  const std::string& title, By by) {
  Range x = steps_of(runs, curve), y;
  if (x.empty()) return "";
  constexpr int buckets = 400;
  std::vector<std::vector<CurveBucket>> lines;
  for (const RunHistory& run : runs) {
    lines.push_back(bucketed(run.*curve, static_cast<int64_t>(x.low), static_cast<int64_t>(x.high), buckets));
    for (const CurveBucket& b : lines.back()) y.add(b.min), y.add(b.max);
    if (points)
      for (const CurvePoint& p : (run.*points).points) y.add(p.value);
  }
  // On a linear scale, spikes of two orders of magnitude would hide the rest of the curve.
  const bool logarithmic = curve == &RunHistory::grad_norm && y.low > 0 && y.high / y.low > 100;
  if (logarithmic) y = {std::log10(y.low), std::log10(y.high)};
  x.add_margin();
  y.add_margin();
  auto px = [&](double step) {
    return left + (step - x.low) / (x.high - x.low) * (panel_width - left - right);
  };
  auto py = [&](double value) {
    const double v = logarithmic ? std::log10(value) : value;
    return panel_height - bottom - (v - y.low) / (y.high - y.low) * (panel_height - top - bottom);
  };
  std::string s = fmt::format(
      "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n<text class=\"title\" x=\"{}\" "
      "y=\"18\">{}{}</text>\n",
      panel_width, panel_height, title, left, title, logarithmic ? " (log scale)" : "");
  for (double t : axis_ticks(y.low, y.high, 5)) {
    const double value = logarithmic ? std::pow(10, t) : t;
    s += fmt::format(
        "<path class=\"grid\" d=\"M{} {:.1f}H{}\"/><text class=\"tick\" text-anchor=\"end\" x=\"{}\" "
        "y=\"{:.1f}\">{}</text>\n",
        left, py(value), panel_width - right, left - 6, py(value) + 4,
        value < 10000 ? fmt::format("{:.4g}", value) : compact_count(value));
  }
  const double unit = axis_unit(by);
  for (double t : axis_ticks(x.low / unit, x.high / unit, 6))
    s += fmt::format("<text class=\"tick\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{}\">{}</text>\n",
                     px(t * unit), panel_height - bottom + 18,
                     by == By::hours ? fmt::format("{:.4g} h", t) : compact_count(t));
  for (size_t r = 0; r < runs.size(); ++r) {
    const auto& line = lines[r];
    if (line.empty()) continue;
    std::string mean, band_top, band_bottom;
    for (const CurveBucket& b : line) {
      mean += fmt::format("{}{:.1f} {:.1f}", mean.empty() ? "M" : "L", px(b.step), py(b.mean));
      band_top += fmt::format("{}{:.1f} {:.1f}", band_top.empty() ? "M" : "L", px(b.step), py(b.max));
      band_bottom.insert(0, fmt::format("L{:.1f} {:.1f}", px(b.step), py(b.min)));
    }
    s += fmt::format(
        "<path class=\"band\" fill=\"{0}\" d=\"{1}{2}Z\"/><path class=\"line\" stroke=\"{0}\" d=\"{3}\"/>\n",
        color_of(r), band_top, band_bottom, mean);
    if (points)
      for (const CurvePoint& p : (runs[r].*points).points)
        s += fmt::format(
            "<circle r=\"3.5\" fill=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\"><title>validation loss {:.4f} at "
            "{}</title></circle>\n",
            color_of(r), px(static_cast<double>(p.step)), py(p.value), p.value, axis_text(by, p.step));
  }
  return s + "</svg>\n";
}

}  // namespace

std::vector<double> axis_ticks(double low, double high, int count) {
  if (!(high > low) || count < 1) return {low};
  const double rough = (high - low) / count, power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (double factor : {1.0, 2.0, 5.0})
    if (factor * power >= rough * 0.999) {
      step = factor * power;
      break;
    }
  std::vector<double> ticks;
  const auto first = static_cast<int64_t>(std::ceil(low / step - 1e-9)),
             last = static_cast<int64_t>(std::floor(high / step + 1e-9));
  for (int64_t i = first; i <= last; ++i) ticks.push_back(static_cast<double>(i) * step);
  return ticks;
}

std::string text_chart(std::span<const RunHistory> given, Curve RunHistory::*curve, int width, int height,
                       By by) {
  const std::vector<RunHistory> runs = placed_by(given, by);
  const Range x = steps_of(runs, curve);
  if (x.empty()) return "";
  const auto first = static_cast<int64_t>(x.low), last = static_cast<int64_t>(x.high);
  width = static_cast<int>(std::min<int64_t>(width, last - first + 1));
  Range y;
  std::vector<std::vector<CurveBucket>> lines;
  for (const RunHistory& run : runs) {
    lines.push_back(bucketed(run.*curve, first, last, width));
    for (const CurveBucket& b : lines.back()) y.add(b.mean);
  }
  const double top_value = y.high, bottom_value = y.low;
  y.add_margin();
  std::vector<std::string> grid(static_cast<size_t>(height), std::string(static_cast<size_t>(width), ' '));
  const double span = static_cast<double>(last - first) + 1;
  for (size_t r = 0; r < lines.size(); ++r)
    for (const CurveBucket& b : lines[r]) {
      const auto column =
          std::min(static_cast<size_t>(width - 1), static_cast<size_t>((b.step - x.low) / span * width));
      const auto row = static_cast<size_t>(std::lround((y.high - b.mean) / (y.high - y.low) * (height - 1)));
      grid[row][column] = marks[r % std::char_traits<char>::length(marks)];
    }
  std::string out;
  for (int r = 0; r < height; ++r) {
    const double value =
        top_value > bottom_value ? y.high - r * (y.high - y.low) / std::max(height - 1, 1) : top_value;
    std::string& line = grid[r];
    line.erase(line.find_last_not_of(' ') + 1);
    out += fmt::format("{:>10.4g} |{}\n", value, line);
  }
  out += fmt::format("{:>10} +{}\n{:>11} {}\n", (runs.front().*curve).key,
                     std::string(static_cast<size_t>(width), '-'), "", axis_range(by, first, last));
  if (runs.size() > 1)
    for (size_t r = 0; r < runs.size(); ++r)
      if (!lines[r].empty())
        out +=
            fmt::format("{:>11} {} {}\n", "", marks[r % std::char_traits<char>::length(marks)], runs[r].name);
  return out;
}

std::string text_table(std::span<const RunHistory> runs) {
  std::vector<std::vector<std::string>> rows{{std::begin(headings), std::end(headings)}};
  for (const RunHistory& run : runs) rows.push_back(cells_of(row_of(run)));
  std::vector<size_t> widths(std::size(headings), 0);
  for (const auto& row : rows)
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  std::string out;
  for (const auto& row : rows) {
    for (size_t c = 0; c < row.size(); ++c)
      out += c == 0 ? fmt::format("{:<{}}", row[c], widths[c]) : fmt::format("  {:>{}}", row[c], widths[c]);
    out += '\n';
  }
  return out;
}

std::string html_report(std::span<const RunHistory> runs, By by) {
  std::string names;
  for (const RunHistory& run : runs) names += (names.empty() ? "" : ", ") + run.name;
  std::string page = page_begin(names, "nrl-train report") + "<table><tr>";
  for (std::string_view heading : headings) page += fmt::format("<th>{}</th>", heading);
  page += "</tr>\n";
  for (size_t r = 0; r < runs.size(); ++r) {
    page += "<tr>";
    const auto cells = cells_of(row_of(runs[r]));
    for (size_t c = 0; c < cells.size(); ++c)
      page += c == 0 ? fmt::format("<td><span class=\"key\" style=\"background:{}\"></span>{}</td>",
                                   color_of(r), html_escaped(cells[c]))
                     : fmt::format("<td>{}</td>", html_escaped(cells[c]));
    page += "</tr>\n";
  }
  page += "</table>\n<div class=\"panels\">\n";
  const std::vector<RunHistory> placed = placed_by(runs, by);
  page += panel(placed, &RunHistory::loss, &RunHistory::val_loss, "training loss, validation as points", by);
  page += panel(placed, &RunHistory::lr, nullptr, "learning rate", by);
  page += panel(placed, &RunHistory::grad_norm, nullptr, "gradient norm", by);
  page += panel(placed, &RunHistory::tokens_per_s, nullptr, "tokens/s", by);
  for (const RunHistory& run : runs) page += layer_maps(run.layers, runs.size() > 1 ? " of " + run.name : "");
  return page + "</div>\n" + std::string(page_end);
}

}  // namespace nrl::monitor
