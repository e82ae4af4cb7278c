#include "apps/planner/pictures.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string_view>

#include <spdlog/fmt/fmt.h>

#include "apps/monitor/chart.h"
#include "apps/monitor/html.h"
#include "apps/planner/predicted_memory.h"
#include "apps/profile/page_parts.h"
#include "apps/profile/page_svg.h"
#include "core/base/text.h"

namespace nrl::planner {
namespace {

using monitor::html_escaped;
using pipeline::ActionKind;
using predict::PassSpan;
using predict::StageTimeline;
using profile::open_svg;
using profile::svg_bytes;
using profile::svg_left;
using profile::svg_ms;
using profile::svg_right;
using profile::svg_width;

/// More rectangles make a page slow.
constexpr size_t most_passes = 8000;

/// Shades of the chunks of a stage, in turn: forward, backward, weight gradients. White numbers are readable
/// on all of them.
constexpr size_t shades = 4;
constexpr std::array<std::array<std::string_view, shades>, 3> pass_colors{{
    {"#2a6fc2", "#1b4f8f", "#4a7fb5", "#35628f"},
    {"#2d8a5f", "#1c6644", "#4a8f6f", "#2f7a6f"},
    {"#b06a14", "#8a4f0c", "#a87a3a", "#8f6a1f"},
}};

int kind_of(const PassSpan& pass) {
  return pass.kind == ActionKind::forward ? 0 : pass.kind == ActionKind::backward_weight ? 2 : 1;
}
std::string color_class(int kind, int chunk) {
  return fmt::format("{}{}", "fbw"[kind], static_cast<size_t>(chunk) % shades);
}
constexpr std::array<std::string_view, 3> kind_names{"forward", "backward", "weight gradients"};

int chunks_of(const predict::StepTimeline& timeline) {
  int most = 0;
  for (const PassSpan& pass : timeline.stages.front().passes) most = std::max(most, pass.chunk);
  return most + 1;
}

double end_of_passes(const predict::StepTimeline& timeline) {
  double end = 0;
  for (const StageTimeline& stage : timeline.stages)
    if (!stage.passes.empty()) end = std::max(end, stage.passes.back().end);
  return end;
}

size_t shown_passes(const predict::StepTimeline& timeline) {
  size_t sum = 0;
  for (const StageTimeline& stage : timeline.stages)
    sum += stage.passes.size() - (stage.hidden.second - stage.hidden.first);
  return sum;
}

std::string pass_style() {
  std::string css;
  for (int kind = 0; kind < 3; ++kind)
    for (size_t c = 0; c < shades; ++c)
      css +=
          fmt::format(".{} {{ fill: {}; }} ", color_class(kind, static_cast<int>(c)), pass_colors[kind][c]);
  return css +
         "\n.number { font-size: 10px; fill: #ffffff; pointer-events: none; } .hidden { fill: var(--grid); "
         "}\n"
         ".front { fill: none; stroke: #d9541e; stroke-width: 1.6; } .dot { fill: #2a78d6; fill-opacity: "
         "0.75; }\n"
         ".best { fill: #d9541e; } .path { stroke: #d9541e; stroke-width: 1.8; }\n";
}

struct Part {
  std::string_view name;
  int color;  // of the same part of a profile
  double predict::StepEstimate::*seconds;
};
constexpr std::array<Part, 7> step_parts{{{"computation", 0, &predict::StepEstimate::compute},
                                          {"layers", 4, &predict::StepEstimate::layers},
                                          {"bubble", 5, &predict::StepEstimate::pipeline},
                                          {"data", 8, &predict::StepEstimate::data},
                                          {"update", 1, &predict::StepEstimate::update},
                                          {"host", 10, &predict::StepEstimate::host},
                                          {"spread", 6, &predict::StepEstimate::spread}}};

std::string parts_part(const predict::StepEstimate& e) {
  std::vector<profile::BarPart> parts;
  std::string legend = "<div class=\"legend\">\n";
  for (const Part& p : step_parts) {
    const double seconds = e.*p.seconds;
    if (!(seconds > 0)) continue;
    parts.push_back({p.color, p.name, seconds});
    legend += profile::legend_entry(
        fmt::format("s{}", p.color),
        fmt::format("{} {}, {:.1f} %", p.name, svg_ms(seconds), 100 * seconds / e.step));
  }
  return "<h2>Parts of the step</h2>\n" + legend + "</div>\n<div class=\"bar\">" +
         profile::parts_svg(parts, e.step, e.step) + "</div>\n";
}

std::string pipeline_part(const predict::DryStages& stages, double seconds) {
  const int64_t microbatches = stages.microbatches(), chunks = stages.layout().chunks,
                count = stages.layout().stages;
  int64_t shown = microbatches;
  predict::StepTimeline timeline = predict::step_timeline(stages, shown, predict::Detail::none);
  while (shown > 1 && shown_passes(timeline) > most_passes) {
    shown = std::min(2 * count, shown / 2);
    timeline = predict::step_timeline(stages, shown, predict::Detail::none);
  }
  std::string s = fmt::format(
      "<h2>Passes of the stages</h2>\n<p class=\"soft\">{} {}, {}, {}; numbers are microbatches{}. The "
      "update "
      "comes "
      "afterwards.</p>\n<div class=\"legend\">\n",
      microbatches, microbatches == 1 ? "microbatch" : "microbatches", counted(count, "stage"),
      chunks > 1 ? fmt::format("{} chunks each", chunks) : "one chunk each",
      count > 1 ? ", the longest path is outlined" : "");
  std::array<bool, 3> used{};
  for (const PassSpan& pass : timeline.stages.front().passes) used[kind_of(pass)] = true;
  for (int kind = 0; kind < 3; ++kind)
    for (int c = 0; used[kind] && c < std::min<int>(static_cast<int>(chunks), shades); ++c)
      s += profile::legend_entry(color_class(kind, c), chunks > 1
                                                           ? fmt::format("{}, chunk {}", kind_names[kind], c)
                                                           : std::string(kind_names[kind]));
  return s + "</div>\n<div class=\"wide\">" + pipeline_svg(timeline, seconds) + "</div>\n";
}

std::string memory_part(const predict::DryStages& stages, std::span<const plan::RunPlan* const> plans,
                        const predict::StepTimeline& timeline) {
  const StageTimeline* largest = nullptr;
  const plan::RunPlan* of = nullptr;
  for (const StageTimeline& stage : timeline.stages) {
    const plan::RunPlan* const plan = plan_of(stages, plans, stage);
    if (!plan || (of && plan->memory.total_bytes() <= of->memory.total_bytes())) continue;
    largest = &stage;
    of = plan;
  }
  const profile::MemoryUse use = predicted_memory(*of, *largest);
  std::string s = fmt::format(
      "<h2>Memory of rank {}</h2>\n<p>Peak {} of {} that are planned, at {} of the step; mean {}.</p>\n<div "
      "class=\"legend\">\n",
      stages.fabric().world() / stages.layout().stages * largest->stage,
      svg_bytes(static_cast<double>(use.peak)), svg_bytes(static_cast<double>(use.arena)),
      svg_ms(use.peak_at), svg_bytes(static_cast<double>(use.mean)));
  for (int c = 0; c < memory::category_count; ++c)
    if (std::any_of(use.curve.begin(), use.curve.end(),
                    [&](const auto& point) { return point.second[c] > 0; }))
      s += profile::legend_entry(fmt::format("c{}", c), memory::name_of(static_cast<memory::Category>(c)));
  return s + "</div>\n<div class=\"wide\">" + profile::memory_svg(use, timeline.end) + "</div>\n";
}

std::string layouts_part(std::span<const LayoutPoint> layouts) {
  if (layouts.empty()) return "";
  std::string s =
      "<h2>Layouts</h2>\n<p class=\"soft\">Planned layouts; the line leads through those than which no other "
      "one is "
      "faster with less memory. The orange one is the first, which the rest of the page is of.</p>\n<div "
      "class=\"wide\" "
      "style=\"max-width: 860px\">" +
      layouts_svg(layouts) + "</div>\n";
  profile::Table table({"layout", "step", "memory"});
  for (const LayoutPoint& l : layouts)
    table.row({l.name, svg_ms(l.seconds), svg_bytes(static_cast<double>(l.memory))});
  return s + table.end();
}

}  // namespace

std::string pipeline_text(const predict::StepTimeline& timeline, int columns, int rows) {
  const double end = end_of_passes(timeline);
  const auto stages = static_cast<int>(timeline.stages.size());
  const int label = static_cast<int>(fmt::format("stage {} ", stages - 1).size());
  const int width = columns - label;
  std::string out;
  bool weights = false;
  for (int s = 0; s < stages; ++s) {
    if (stages > rows && s == rows / 2) {
      s = stages - rows / 2;
      out += fmt::format("{:>{}}\n", "... ", label);
    }
    std::vector<double> covered(static_cast<size_t>(width), 0), longest = covered;
    std::string line(static_cast<size_t>(width), '.');
    const double cell = end / width;
    for (const PassSpan& pass : timeline.stages[s].passes) {
      const int kind = kind_of(pass), digit = pass.microbatch % 10;
      weights |= kind == 2;
      for (int i = static_cast<int>(pass.begin / cell); i < width && i * cell < pass.end; ++i) {
        const double share = std::min(pass.end, (i + 1) * cell) - std::max(pass.begin, i * cell);
        covered[i] += share;
        if (share <= longest[i]) continue;
        longest[i] = share;
        line[i] = static_cast<char>(kind == 0 ? '0' + digit : kind == 1 ? 'a' + digit : '=');
      }
    }
    for (int i = 0; i < width; ++i)
      if (covered[i] < cell / 2) line[i] = '.';
    out += fmt::format("{:<{}}{}\n", fmt::format("stage {}", s), label, line);
  }
  const std::string ends = svg_ms(end);
  out += fmt::format("{:<{}}0{:>{}}\n", "", label, ends, width - 1);
  return out +
         fmt::format("{:<{}}0-9: forward, a-j: backward, of microbatches 0 to 9, 10 to 19, ...{}   .: bubble",
                     "", label, weights ? "   =: weight gradients" : "");
}

std::string pipeline_svg(const predict::StepTimeline& timeline, double seconds) {
  const double end = std::max(seconds, end_of_passes(timeline));
  if (!(end > 0)) return "";
  const auto stages = timeline.stages.size();
  const double row = stages <= 16 ? 24 : stages <= 64 ? 14 : 8, top = 6, gap = row > 10 ? 2 : 1;
  const double bottom = top + row * static_cast<double>(stages),
               scale = (svg_width - svg_left - svg_right) / end;
  const size_t named = row > 10 ? 1 : 2;  // a name for each of so many rows
  const int chunks = chunks_of(timeline);
  std::string s =
      open_svg(svg_width, bottom + 22, "passes of the stages") + profile::time_axis(end, top, bottom);
  const std::vector<predict::PassIndex> path = predict::longest_path(timeline);
  const std::set<predict::PassIndex> on_path(path.begin(), path.end());
  const auto rectangle = [&](const std::string& color, double y, double begin, double until,
                             const std::string& title) {
    s += fmt::format(
        "<rect class=\"{}\" x=\"{:.2f}\" y=\"{:.0f}\" width=\"{:.2f}\" "
        "height=\"{:.0f}\"><title>{}</title></rect>\n",
        color, svg_left + begin * scale, y + gap / 2, std::max(0.3, (until - begin) * scale - 0.4), row - gap,
        title);
  };
  for (size_t i = 0; i < stages; ++i) {
    const StageTimeline& stage = timeline.stages[i];
    const double y = top + row * static_cast<double>(i);
    if (i % named == 0)
      s += fmt::format("<text class=\"name\" x=\"0\" y=\"{:.0f}\">stage {}</text>\n", y + row / 2 + 4, i);
    for (size_t p = 0; p < stage.passes.size(); ++p) {
      const PassSpan& pass = stage.passes[p];
      if (p == stage.hidden.first && stage.hidden.first < stage.hidden.second) {
        const double until = stage.passes[stage.hidden.second - 1].end;
        rectangle("hidden", y, pass.begin, until,
                  fmt::format("{} more passes: {}", stage.hidden.second - p, svg_ms(until - pass.begin)));
        p = stage.hidden.second - 1;
        continue;
      }
      const int kind = kind_of(pass);
      const bool longest = stages > 1 && on_path.contains({static_cast<int>(i), p});
      rectangle(
          color_class(kind, pass.chunk) + (longest ? " path" : ""), y, pass.begin, pass.end,
          fmt::format("stage {}, {} of microbatch {}{}: {} at {}{}", i, kind_names[kind], pass.microbatch,
                      chunks > 1 ? fmt::format(", chunk {}", pass.chunk) : "", svg_ms(pass.end - pass.begin),
                      svg_ms(pass.begin), longest ? ", on the longest path" : ""));
      const std::string number = std::to_string(pass.microbatch);
      if (row >= 14 && (pass.end - pass.begin) * scale > 4 + 6 * static_cast<double>(number.size()))
        s +=
            fmt::format("<text class=\"number\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
                        svg_left + (pass.begin + pass.end) / 2 * scale, y + row / 2 + 3.5, number);
    }
  }
  return s + "</svg>\n";
}

std::string layouts_svg(std::span<const LayoutPoint> layouts) {
  if (layouts.empty()) return "";
  double x0 = layouts.front().seconds, x1 = x0, y1 = 0;
  for (const LayoutPoint& l : layouts) {
    x0 = std::min(x0, l.seconds), x1 = std::max(x1, l.seconds);
    y1 = std::max(y1, static_cast<double>(l.memory));
  }
  const double margin = x1 > x0 ? (x1 - x0) * 0.06 : x1 * 0.05;
  x0 -= margin, x1 += margin, y1 *= 1.06;
  constexpr double width = 760, height = 360, start = 84, top = 10, bottom = 44;
  const auto px = [&](double seconds) { return start + (seconds - x0) / (x1 - x0) * (width - start - 12); };
  const auto py = [&](double bytes) { return height - bottom - bytes / y1 * (height - top - bottom); };
  std::string s = open_svg(width, height, "layouts by time and memory");
  for (const double t : monitor::axis_ticks(x0 * 1e3, x1 * 1e3, 6))
    s += fmt::format(
        "<path class=\"grid\" d=\"M{0:.1f} {1:.0f}V{2:.0f}\"/><text class=\"tick\" text-anchor=\"middle\" "
        "x=\"{0:.1f}\" y=\"{3:.0f}\">{4:.6g}</text>\n",
        px(t * 1e-3), top, height - bottom, height - bottom + 16, t);
  constexpr double gib = 1 << 30;
  for (const double b : monitor::axis_ticks(0, y1 / gib, 6))
    s += fmt::format(
        "<path class=\"grid\" d=\"M{0:.0f} {1:.1f}H{2:.0f}\"/><text class=\"tick\" text-anchor=\"end\" "
        "x=\"{3:.0f}\" y=\"{4:.1f}\">{5:.4g} GiB</text>\n",
        start, py(b * gib), width - 12, start - 6, py(b * gib) + 4, b);
  s += fmt::format(
      "<text class=\"tick\" text-anchor=\"middle\" x=\"{:.0f}\" y=\"{:.0f}\">ms per step</text>\n",
      (start + width) / 2, height - 10);
  std::vector<LayoutPoint> by_time(layouts.begin(), layouts.end());
  std::stable_sort(by_time.begin(), by_time.end(), [](const LayoutPoint& a, const LayoutPoint& b) {
    return std::pair(a.seconds, a.memory) < std::pair(b.seconds, b.memory);
  });
  std::string line;
  int64_t least = INT64_MAX;
  for (const LayoutPoint& l : by_time) {
    if (l.memory >= least) continue;
    least = l.memory;
    const double x = px(l.seconds), y = py(static_cast<double>(l.memory));
    line += line.empty() ? fmt::format("M{:.1f} {:.1f}", x, y) : fmt::format("H{:.1f}V{:.1f}", x, y);
  }
  s += fmt::format(
      "<path class=\"front\" d=\"{}\"><title>no other layout is faster with less memory</title></path>\n",
      line);
  for (size_t i = 0; i < layouts.size(); ++i)
    s += fmt::format(
        "<circle class=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\"><title>{}: {}, {}</title></circle>\n",
        i == 0 ? "best" : "dot", px(layouts[i].seconds), py(static_cast<double>(layouts[i].memory)),
        html_escaped(layouts[i].name), svg_ms(layouts[i].seconds),
        svg_bytes(static_cast<double>(layouts[i].memory)));
  return s + "</svg>\n";
}

std::string plan_page(const std::string& heading, const RunEstimate& estimate,
                      const predict::DryStages& stages, std::span<const LayoutPoint> layouts,
                      std::span<const plan::RunPlan* const> plans) {
  const predict::StepEstimate& e = estimate.likely;
  std::string page = monitor::page_begin(
      heading, "nrl-train plan", std::string(profile::page_style) + profile::svg_style() + pass_style());
  page += fmt::format("<p class=\"soft\">{}</p>\n<div class=\"facts\">\n", html_escaped(heading));
  const auto fact = [&](std::string_view name, const std::string& value) {
    page += fmt::format("<div><b>{}</b>{}</div>\n", html_escaped(value), html_escaped(name));
  };
  fact(fmt::format("per step, estimated ({})", e.sources()), svg_ms(e.step));
  fact("at good and at poor rates", fmt::format("{}, {}", svg_ms(estimate.good), svg_ms(estimate.poor)));
  fact("tokens/s", grouped(std::llround(estimate.tokens_per_second())));
  fact("MFU", fmt::format("{:.1f} %", 100 * estimate.mfu()));
  // Both drawings have the same axis of time.
  const predict::StepTimeline timeline =
      predict::step_timeline(stages, 2 * stages.layout().stages, predict::Detail::dry_run);
  page += "</div>\n" + parts_part(e) + pipeline_part(stages, timeline.end) +
          memory_part(stages, plans, timeline) + layouts_part(layouts);
  for (const std::string& part : estimate.without)
    page += fmt::format("<p class=\"soft\">Not contained: {}.</p>\n", html_escaped(part));
  return page + std::string(monitor::page_end);
}

}  // namespace nrl::planner
