#include "apps/profile/page.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <spdlog/fmt/fmt.h>

#include "apps/monitor/html.h"
#include "apps/profile/page_parts.h"
#include "apps/profile/page_svg.h"
#include "apps/profile/summary.h"
#include "core/base/text.h"
#include "memory/plan.h"

namespace nrl::profile {
namespace {
namespace page_parts {  // short names, which other files of this directory have, too

using monitor::html_escaped;
using nrl::grouped;

constexpr size_t most_ranks = 64, most_operations = 100, most_alive = 50, most_buffers = 200;

std::string ms(double seconds) {
  return fmt::format("{:.2f}", seconds * 1e3);
}
std::string percent(double part, double whole) {
  return whole > 0 ? fmt::format("{:.1f} %", part / whole * 100) : "-";
}
std::string rate(double amount, double seconds, double unit) {
  return amount > 0 && seconds > 0 ? fmt::format("{:.3g}", amount / seconds / unit) : "-";
}
std::string bytes_text(double bytes) {
  return human_bytes(static_cast<uint64_t>(std::max(0.0, bytes)));
}

std::string escaped_lines(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    out += html_escaped(text.substr(0, end)) + "\n";
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

double mean_wall(const Profile& p) {
  double sum = 0;
  for (const RankProfile& r : p.ranks) sum += r.split.wall;
  return p.ranks.empty() ? 0 : sum / static_cast<double>(p.ranks.size());
}

std::string facts(const Profile& p) {
  const double wall = mean_wall(p);
  std::string s = fmt::format(
      "<p class=\"soft\">{}</p>\n<p class=\"soft\">nrl-train {}, started {}; steps {} to {}; {}, {}</p>\n"
      "<div class=\"facts\">\n",
      html_escaped(p.facts.command), html_escaped(p.facts.version), html_escaped(p.facts.started),
      p.facts.first_step, p.facts.last_step, counted(p.facts.world, "rank"), counted(p.facts.nodes, "node"));
  const auto fact = [&](std::string_view name, const std::string& value) {
    s += fmt::format("<div><b>{}</b>{}</div>\n", value, name);
  };
  fact("per step, mean of the ranks", ms(wall) + " ms");
  if (wall > 0 && p.facts.tokens_per_step > 0)
    fact("tokens/s", grouped(std::llround(static_cast<double>(p.facts.tokens_per_step) / wall)));
  if (wall > 0 && p.facts.flops_per_step > 0)
    fact("model TFLOP/s, all ranks", rate(p.facts.flops_per_step, wall, 1e12));
  if (p.split.wall > 0) fact("of the step are operations", percent(utilization(p.split), 1));
  double seconds = 0, attainable = 0;
  for (const Operation& o : p.operations) seconds += o.seconds, attainable += o.attainable;
  if (seconds > 0 && attainable > 0)
    fact("of the time of operations is attainable at the machine's peaks", percent(attainable, seconds));
  return s + "</div>\n";
}

std::string findings(const Profile& p) {
  std::string s = "<h2>Verdicts</h2>\n";
  if (p.findings.empty()) return s + "<p>No finding above the thresholds.</p>\n";
  s += "<ol class=\"findings\">\n";
  constexpr std::string_view severities[] = {"low", "medium", "high"};
  for (const Finding& f : p.findings) {
    const std::string_view severity = severities[static_cast<int>(f.severity)];
    s += fmt::format("<li><span class=\"{0}\">{0}</span> {1}", severity, html_escaped(f.text));
    if (f.seconds > 0)
      s += fmt::format(" <span class=\"soft\">({} ms, {} of the step)</span>", ms(f.seconds),
                       percent(f.seconds, p.split.wall));
    for (const std::string& o : f.overrides) s += fmt::format("<br><code>{}</code>", html_escaped(o));
    if (f.predicted_s > 0) {
      s += fmt::format("<br>predicted: {} ms per step ({:+.1f} %)", ms(f.predicted_s),
                       p.split.wall > 0 ? (f.predicted_s / p.split.wall - 1) * 100 : 0);
      if (f.model_error != 0) s += fmt::format(", model error {:.1f} %", std::abs(f.model_error) * 100);
      if (f.changes_numbers) s += "; changes numbers";
    }
    s += "</li>\n";
  }
  return s + "</ol>\n";
}

// The ranks to show, by rank: of many, half the slowest and half the fastest ones.
std::vector<const RankProfile*> shown(const Profile& p) {
  std::vector<const RankProfile*> ranks;
  for (const RankProfile& r : p.ranks) ranks.push_back(&r);
  if (ranks.size() <= most_ranks) return ranks;
  std::stable_sort(ranks.begin(), ranks.end(),
                   [](const RankProfile* a, const RankProfile* b) { return a->own_work() > b->own_work(); });
  ranks.erase(ranks.begin() + most_ranks / 2, ranks.end() - most_ranks / 2);
  std::sort(ranks.begin(), ranks.end(),
            [](const RankProfile* a, const RankProfile* b) { return a->rank < b->rank; });
  return ranks;
}

std::string note_of_shown(const Profile& p) {
  if (p.ranks.size() <= most_ranks) return "";
  return fmt::format(
      "<p class=\"soft\">The {0} ranks with most own work and the {0} with least, of {1}.</p>\n",
      most_ranks / 2, p.ranks.size());
}

std::string splits(const Profile& p) {
  std::string s = "<h2>Split of a step</h2>\n" + note_of_shown(p);
  s += "<div class=\"legend\">\n";
  for (size_t i = 0; i < split_parts.size(); ++i) {
    const double seconds = p.split.*split_parts[i].second;
    if (seconds > 0)
      s += legend_entry(fmt::format("s{}", i), fmt::format("{} {} ms, {}", split_parts[i].first, ms(seconds),
                                                           percent(seconds, p.split.wall)));
  }
  s += "</div>\n<p class=\"soft\">Figures are of the rank with most own work, percentages of its "
       "step.</p>\n<div "
       "class=\"bars\">\n";
  double longest = 0;
  for (const RankProfile& r : p.ranks) longest = std::max(longest, r.split.wall);
  for (const RankProfile* r : shown(p))
    s += fmt::format("<div>rank {}</div><div class=\"bar\">{}</div><div>{} ms</div>\n", r->rank,
                     split_svg(r->split, longest), ms(r->split.wall));
  return s + "</div>\n";
}

std::string timeline_part(const Timeline& timeline) {
  const std::string svg = timeline_svg(timeline);
  if (svg.empty()) return "";
  std::string s =
      fmt::format("<h2>Step {} of rank {}</h2>\n<div class=\"legend\">\n", timeline.step, timeline.rank);
  std::array<bool, paints.size()> used{};
  for (const Lane& lane : timeline.lanes)
    for (const Bar& bar : lane.bars) used[static_cast<size_t>(bar.paint)] = true;
  for (size_t i = 0; i < paints.size(); ++i)
    if (used[i]) s += legend_entry(fmt::format("p{}", i), paints[i].name);
  return s + "</div>\n<div class=\"wide\">" + svg + "</div>\n";
}

std::string operations(const Profile& p) {
  if (p.operations.empty()) return "";
  constexpr std::string_view bounds[] = {"arithmetic", "memory", "launch"};
  const double ranks = std::max<double>(1, static_cast<double>(p.ranks.size())), wall = mean_wall(p);
  std::string s =
      "<h2>Operations</h2>\n<p class=\"soft\">Per step, mean of the ranks, by the time lost against what is "
      "attainable at the machine's peaks.</p>\n";
  Table table({"operation", "part", "calls", "ms", "of the step", "lost ms", "of attainable", "bound",
               "TFLOP/s", "GB/s", "mean us", "min us", "max us"});
  for (size_t i = 0; i < std::min(p.operations.size(), most_operations); ++i) {
    const Operation& o = p.operations[i];
    const double seconds = o.seconds / ranks;
    const auto us = [](double t) { return fmt::format("{:.1f}", t * 1e6); };
    table.row({o.name, o.part, fmt::format("{:.4g}", static_cast<double>(o.calls) / ranks), ms(seconds),
               percent(seconds, wall), ms(o.lost() / ranks), percent(o.attainable, o.seconds),
               std::string(bounds[static_cast<int>(o.bound)]), rate(o.flops, o.seconds, 1e12),
               rate(o.bytes, o.seconds, 1e9),
               o.calls > 0 ? us(o.seconds / static_cast<double>(o.calls)) : "-", us(o.shortest),
               us(o.longest)});
  }
  s += table.end();
  if (p.operations.size() > most_operations)
    s += fmt::format("<p class=\"soft\">{} more are not shown.</p>\n", p.operations.size() - most_operations);
  const std::string svg = roofline_svg(p.operations);
  if (!svg.empty())
    s += "<h2>Roofline</h2>\n<p class=\"soft\">Operations with FLOPs; the area grows with their time. Lines: "
         "the "
         "machine's peaks.</p>\n<div class=\"wide\" style=\"max-width: 860px\">" +
         svg + "</div>\n";
  return s;
}

std::string memory_part(const Profile& p) {
  if (p.ranks.empty()) return "";
  const RankProfile& rank = largest(p);
  if (rank.memory.arena == 0) return "";
  const MemoryUse& m = rank.memory;
  std::string s = fmt::format(
      "<h2>Memory of rank {}</h2>\n<p>Peak {} of {} in the arena ({}), at {} ms of the step; mean "
      "{}.</p>\n<div "
      "class=\"legend\">\n",
      rank.rank, bytes_text(static_cast<double>(m.peak)), bytes_text(static_cast<double>(m.arena)),
      percent(static_cast<double>(m.peak), static_cast<double>(m.arena)), ms(m.peak_at),
      bytes_text(static_cast<double>(m.mean)));
  for (int c = 0; c < memory::category_count; ++c)
    if (std::any_of(m.curve.begin(), m.curve.end(), [&](const auto& point) { return point.second[c] > 0; }))
      s += legend_entry(fmt::format("c{}", c), memory::name_of(static_cast<memory::Category>(c)));
  s += "</div>\n<div class=\"wide\">" + memory_svg(m, rank.split.wall) + "</div>\n";
  if (m.at_peak.empty()) return s;
  s += "<details><summary>Alive at the peak</summary>\n";
  Table table({"buffer", "category", "size", "of the peak", "from ms", "to ms"});
  for (size_t i = 0; i < std::min(m.at_peak.size(), most_alive); ++i) {
    const Alive& a = m.at_peak[i];
    table.row({a.name, std::string(memory::name_of(a.category)), bytes_text(static_cast<double>(a.bytes)),
               percent(static_cast<double>(a.bytes), static_cast<double>(m.peak)), ms(a.from), ms(a.to)});
  }
  s += table.end();
  if (m.at_peak.size() > most_alive)
    s += fmt::format("<p class=\"soft\">{} more are not shown.</p>\n", m.at_peak.size() - most_alive);
  return s + "</details>\n";
}

std::string communication(const Profile& p) {
  std::map<std::tuple<std::string, std::string, std::string>, std::pair<GroupTime, int>> sums;
  for (const RankProfile& r : p.ranks)
    for (const GroupTime& g : r.groups) {
      auto& [sum, count] = sums[{g.group, g.operation, g.algorithm}];
      if (count++ == 0) {
        sum = g;
        continue;
      }
      sum.ranks = std::max(sum.ranks, g.ranks);
      sum.nodes = std::max(sum.nodes, g.nodes);
      sum.calls += g.calls, sum.bytes += g.bytes, sum.wire_bytes += g.wire_bytes;
      sum.busy += g.busy, sum.exposed += g.exposed, sum.late += g.late, sum.wire += g.wire;
    }
  if (sums.empty()) return "";
  std::string s =
      "<h2>Communication</h2>\n<p class=\"soft\">Per step, mean of the ranks that take part. Bandwidths are "
      "of the time "
      "after the last rank arrived.</p>\n";
  Table table({"group", "operation", "algorithm", "ranks", "nodes", "calls", "bytes", "busy ms", "late ms",
               "wire ms", "exposed ms", "of the step", "hidden", "alg GB/s", "bus GB/s"});
  const double wall = mean_wall(p);
  for (const auto& [key, value] : sums) {
    const auto& [g, count] = value;
    const double n = count;
    table.row({g.group, g.operation, g.algorithm, fmt::format("{}", g.ranks), fmt::format("{}", g.nodes),
               fmt::format("{:.4g}", static_cast<double>(g.calls) / n),
               bytes_text(static_cast<double>(g.bytes) / n), ms(g.busy / n), ms(g.late / n), ms(g.wire / n),
               ms(g.exposed / n), percent(g.exposed / n, wall),
               percent(std::max(0.0, g.busy - g.exposed), g.busy),
               rate(static_cast<double>(g.bytes), g.wire, 1e9), rate(g.wire_bytes, g.wire, 1e9)});
  }
  return s + table.end();
}

std::string ranks(const Profile& p) {
  double best = 0;
  for (const RankProfile& r : p.ranks)
    if (best == 0 || r.own_work() < best) best = r.own_work();
  std::string s = "<h2>Ranks</h2>\n" + note_of_shown(p);
  Table table({"rank", "host", "device", "step ms", "own work ms", "score", "arrived last", "caused ms",
               "data ms", "host ms", "CPU s", "cores", "switches", "migrations", "resident", "clock error us",
               "not recorded"});
  for (const RankProfile* r : shown(p))
    table.row({fmt::format("{}", r->rank), r->host, r->device, ms(r->split.wall), ms(r->own_work()),
               r->own_work() > 0 ? fmt::format("{:.2f}", best / r->own_work()) : "-",
               grouped(r->arrived_last), ms(r->caused_waiting), ms(r->split.data), ms(r->split.host),
               fmt::format("{:.2f}", r->cpu_seconds), fmt::format("{}", r->cores),
               grouped(r->involuntary_switches), grouped(r->migrations),
               bytes_text(static_cast<double>(r->resident_bytes)),
               fmt::format("{:.1f}", r->clock_error * 1e6), grouped(r->dropped)});
  return s + table.end();
}

std::string whole_page(const Profile& profile, const Timeline& timeline) {
  std::string page = monitor::page_begin(
      fmt::format("Profile of steps {} to {}", profile.facts.first_step, profile.facts.last_step),
      "nrl-train profile", std::string(page_style) + svg_style());
  page += facts(profile) + findings(profile) + splits(profile) + timeline_part(timeline) +
          operations(profile) + memory_part(profile) + communication(profile) + ranks(profile);
  if (!profile.facts.config.empty())
    page +=
        fmt::format("<h2>Configuration</h2>\n<details><summary>resolved</summary><pre>{}</pre></details>\n",
                    escaped_lines(profile.facts.config));
  return page + std::string(monitor::page_end);
}

std::string arena_page(const Recorded& recorded) {
  std::string page =
      monitor::page_begin(fmt::format("Memory of rank {}", recorded.rank),
                          fmt::format("Memory of rank {}, step {}", recorded.rank, recorded.first_step),
                          std::string(page_style) + svg_style());
  page += fmt::format(
      "<p class=\"soft\">Lifetimes of the {} largest of {} buffers at their offsets in the arena of "
      "{}.</p>\n<div class=\"legend\">\n",
      std::min(most_buffers, recorded.buffers.size()), recorded.buffers.size(),
      bytes_text(static_cast<double>(recorded.arena_bytes)));
  for (int c = 0; c < memory::category_count; ++c)
    page += legend_entry(fmt::format("c{}", c), memory::name_of(static_cast<memory::Category>(c)));
  page += "</div>\n<div class=\"wide\">" + arena_svg(recorded, most_buffers) + "</div>\n";
  std::vector<const memory::MemoryPlan::Buffer*> largest;
  for (const auto& buffer : recorded.buffers) largest.push_back(&buffer);
  std::stable_sort(largest.begin(), largest.end(),
                   [](const auto* a, const auto* b) { return a->bytes > b->bytes; });
  if (largest.size() > most_buffers) largest.resize(most_buffers);
  Table table({"buffer", "category", "memory", "size", "offset", "lifetimes"});
  constexpr std::string_view tiers[] = {"device", "pinned", "host"};
  for (const auto* b : largest) {
    std::string lives = b->always() ? "always" : "";
    for (size_t i = 0; i < std::min<size_t>(b->lifetimes.size(), 4); ++i)
      lives += fmt::format("{}{} to {}", i ? ", " : "ticks ", b->lifetimes[i].first, b->lifetimes[i].last);
    if (b->lifetimes.size() > 4) lives += fmt::format(" and {} more", b->lifetimes.size() - 4);
    table.row({b->name, std::string(memory::name_of(b->category)),
               std::string(tiers[static_cast<int>(b->tier)]), bytes_text(static_cast<double>(b->bytes)),
               fmt::format("{}", b->offset), lives});
  }
  return page + table.end() + std::string(monitor::page_end);
}

}  // namespace page_parts
}  // namespace

std::string html_page(const Profile& profile, const Timeline& timeline) {
  return page_parts::whole_page(profile, timeline);
}

std::string memory_page(const Recorded& recorded) {
  return page_parts::arena_page(recorded);
}

}  // namespace nrl::profile
