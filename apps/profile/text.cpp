#include "apps/profile/text.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "apps/monitor/format.h"
#include "apps/profile/analyses.h"
#include "apps/profile/summary.h"
#include "core/base/sample.h"
#include "core/base/text.h"

namespace nrl::profile {
namespace {

constexpr double most_unattributed = 0.02;

std::string ms(double seconds) {
  return fmt::format("{:.1f}", seconds * 1e3);
}

std::string percent(double part, double whole) {
  return whole > 0 ? fmt::format("{:.1f} %", 100 * part / whole) : "-";
}

std::string bytes(int64_t count) {
  return human_bytes(static_cast<uint64_t>(std::max<int64_t>(count, 0)));
}

std::string cut(std::string_view name, size_t most) {
  return clipped(name, most);
}

// The operations of a profile in one grouping, as the mean over the ranks.
std::vector<Operation> grouped(const Profile& profile, OperationView::By by) {
  std::vector<Operation> operations = by == OperationView::By::layer ? profile.layers : profile.operations;
  const auto ranks = static_cast<double>(profile.ranks.size());
  for (Operation& o : operations) {
    (by == OperationView::By::part ? o.name : o.part).clear();
    for (double* sum : {&o.seconds, &o.flops, &o.bytes, &o.attainable, &o.arithmetic}) *sum /= ranks;
    o.calls = std::llround(static_cast<double>(o.calls) / ranks);
  }
  return merge_operations(std::move(operations));
}

const char* name_of(Bound bound) {
  constexpr const char* names[] = {"arithmetic", "memory", "launch"};
  return names[static_cast<int>(bound)];
}

}  // namespace

std::string aligned(const std::vector<std::vector<std::string>>& rows, size_t left, bool last_left) {
  std::vector<size_t> widths;
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) {
      if (i == widths.size()) widths.push_back(0);
      widths[i] = std::max(widths[i], row[i].size());
    }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const bool to_left = i < left || (last_left && i + 1 == widths.size());
      line += i == 0 ? "" : "  ";
      line += to_left ? fmt::format("{:<{}}", row[i], widths[i]) : fmt::format("{:>{}}", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::string split_text(const Profile& profile) {
  const Split& s = profile.split;
  const RankProfile& rank = slowest(profile);
  std::string parts;
  double rest = 0;
  for (const auto& [name, part] : split_parts) {
    if (s.*part < 0.005 * s.wall)
      rest += s.*part;
    else
      parts += fmt::format("{} {}  ", name, percent(s.*part, s.wall));
  }
  parts += fmt::format("rest {}", percent(rest, s.wall));
  std::string time = fmt::format("{} ms", ms(s.wall));
  if (rank.step_s.size() > 1)
    time += fmt::format("  (p50 {}, p95 {}, p99 {} of {} steps)", ms(quantile(rank.step_s, 0.5)),
                        ms(quantile(rank.step_s, 0.95)), ms(quantile(rank.step_s, 0.99)), rank.step_s.size());
  if (profile.facts.tokens_per_step > 0 && s.wall > 0)
    time +=
        fmt::format("  {} tokens/s",
                    nrl::grouped(std::llround(static_cast<double>(profile.facts.tokens_per_step) / s.wall)));
  std::vector<std::pair<std::string, std::string>> rows{{"step", time}, {"", parts}};
  if (s.unattributed > most_unattributed * s.wall)
    rows.emplace_back("warning",
                      fmt::format("{} of the step have no recorded cause; expected at most {:.0f} %",
                                  percent(s.unattributed, s.wall), 100 * most_unattributed));
  int64_t dropped = 0;
  for (const RankProfile& r : profile.ranks) dropped += r.dropped;
  if (dropped > 0)
    rows.emplace_back("warning",
                      fmt::format("{} ranges were not recorded; expected 0. Fix: fewer profiling.steps",
                                  nrl::grouped(dropped)));
  return monitor::labeled_lines(rows);
}

namespace {

const char* heading(OperationView::By by) {
  constexpr const char* names[] = {"operation", "part of a step", "layer"};
  return names[static_cast<int>(by)];
}

}  // namespace

std::string operations_text(const Profile& profile, const OperationView& view) {
  const bool by_part = view.by == OperationView::By::part;
  std::vector<std::vector<std::string>> rows{{heading(view.by), "calls", "ms", "share", "mean us", "TFLOP/s",
                                              "GB/s", "bound", "of limit", "lost ms"}};
  size_t left_out = 0;
  for (const Operation& o : grouped(profile, view.by)) {
    const double mean = o.calls > 0 ? o.seconds / static_cast<double>(o.calls) : o.seconds;
    if (mean * 1e3 < view.threshold_ms) continue;
    if (view.top > 0 && rows.size() > view.top) {
      ++left_out;
      continue;
    }
    rows.push_back(
        {cut(by_part ? o.part : o.name, 30), std::to_string(o.calls), ms(o.seconds),
         percent(o.seconds, profile.split.wall), fmt::format("{:.1f}", mean * 1e6),
         o.flops > 0 && o.seconds > 0 ? fmt::format("{:.2f}", o.flops / o.seconds * 1e-12) : "-",
         o.bytes > 0 && o.seconds > 0 ? fmt::format("{:.1f}", o.bytes / o.seconds * 1e-9) : "-",
         name_of(o.bound),
         o.attainable > 0 && o.seconds > 0 ? fmt::format("{:.0f} %", 100 * o.attainable / o.seconds) : "-",
         ms(o.lost())});
  }
  std::string out = aligned(rows, 1);
  if (left_out > 0) out += fmt::format("and {} more. Fix: --top 0 shows all\n", left_out);
  return out;
}

std::string memory_text(const Profile& profile, size_t top) {
  const RankProfile& rank = largest(profile);
  const MemoryUse& m = rank.memory;
  if (m.peak == 0) return "";
  std::array<int64_t, memory::category_count> at_peak{};
  int64_t most = -1;
  for (const auto& [time, categories] : m.curve) {
    int64_t sum = 0;
    for (const int64_t b : categories) sum += b;
    if (sum <= most) continue;
    most = sum;
    at_peak = categories;
  }
  std::string text = fmt::format("rank {}: peak {} of {} arena at {} ms of the step, mean {}", rank.rank,
                                 bytes(m.peak), bytes(m.arena), ms(m.peak_at), bytes(m.mean));
  std::string categories;
  for (int c = 0; c < memory::category_count; ++c)
    if (at_peak[c] > 0)
      categories += fmt::format("{}{} {}", categories.empty() ? "" : "  ",
                                memory::name_of(static_cast<memory::Category>(c)), bytes(at_peak[c]));
  std::vector<std::pair<std::string, std::string>> rows{{"memory", text}};
  if (!categories.empty()) rows.emplace_back("at peak", categories);
  if (rank.resident_bytes > 0)
    rows.emplace_back("process", bytes(rank.resident_bytes) + " resident at the end");
  std::string out = monitor::labeled_lines(rows);
  std::vector<std::vector<std::string>> table{{"buffer at the peak", "category", "size", "from ms", "to ms"}};
  for (const Alive& a : m.at_peak) {
    if (top > 0 && table.size() > top) break;
    table.push_back(
        {cut(a.name, 48), std::string(memory::name_of(a.category)), bytes(a.bytes), ms(a.from), ms(a.to)});
  }
  if (table.size() > 1) out += aligned(table, 2);
  return out;
}

std::string groups_text(const Profile& profile) {
  const RankProfile& rank = slowest(profile);
  if (rank.groups.empty()) return "";
  std::vector<std::vector<std::string>> rows{{"group", "operation", "ranks", "calls", "bytes", "busy ms",
                                              "late", "wire", "exposed", "hidden", "GB/s", "bus", "link"}};
  std::string carried;
  for (const GroupTime& g : rank.groups) {
    const auto rate = [&](double amount) {
      return g.wire > 0 ? fmt::format("{:.2f}", amount / g.wire * 1e-9) : "-";
    };
    rows.push_back({cut(g.group, 12), cut(g.operation, 16), std::to_string(g.ranks), std::to_string(g.calls),
                    bytes(g.bytes), ms(g.busy), ms(g.late), ms(g.wire), ms(g.exposed),
                    g.busy > 0 ? fmt::format("{:.0f} %", 100 * (1 - std::min(g.exposed / g.busy, 1.0))) : "-",
                    rate(static_cast<double>(g.bytes)), rate(g.wire_bytes),
                    g.link > 0 && g.wire > 0 ? percent(g.wire_bytes / g.wire, g.link) : "-"});
    if (!g.algorithm.empty())
      carried += fmt::format("{}{} {}: {}", carried.empty() ? "carried by " : ", ", cut(g.group, 12),
                             cut(g.operation, 16), cut(g.algorithm, 20));
  }
  return aligned(rows, 2) + (carried.empty() ? "" : carried + "\n");
}

std::string ranks_text(const Profile& profile) {
  std::vector<std::vector<std::string>> rows{{"rank", "own work ms", "score", "last", "caused ms",
                                              "cores busy", "switches", "longer than the median in"}};
  const std::vector<Standing> all = standings(profile);
  for (size_t i = 0; i < all.size(); ++i) {
    const RankProfile& r = profile.ranks[i];
    const Standing& s = all[i];
    std::string longer = s.longer ? fmt::format("{} +{} ms", s.longer, ms(s.longer_s)) : "";
    if (s.severity != Severity::low)
      longer += fmt::format("{}on {}", longer.empty() ? "" : ", ", cut(r.host, 24));
    rows.push_back(
        {std::to_string(r.rank), ms(r.own_work()), fmt::format("{:.2f}", s.score),
         std::to_string(r.arrived_last), ms(r.caused_waiting),
         r.split.wall > 0 && r.cpu_seconds > 0 ? fmt::format("{:.1f}", r.cpu_seconds / r.split.wall) : "-",
         std::to_string(r.involuntary_switches), longer});
  }
  return aligned(rows, 0, true);
}

std::string findings_text(const Profile& profile) {
  std::vector<std::pair<std::string, std::string>> rows;
  double error = 0;
  bool predicted = false;
  const double wall = profile.split.wall;
  for (size_t i = 0; i < profile.findings.size(); ++i) {
    const Finding& f = profile.findings[i];
    std::string text = f.text;
    std::string keys;
    for (const std::string& o : f.overrides) keys += (keys.empty() ? "" : " ") + o;
    const char* const numbers = f.changes_numbers ? "  changes numbers" : "";
    if (f.predicted_s > 0) {
      text += fmt::format("\n{}  predicted {} ms per step ({:+.1f} %){}", keys.empty() ? "without it" : keys,
                          ms(f.predicted_s), wall > 0 ? 100 * (f.predicted_s / wall - 1) : 0.0, numbers);
      error = std::max(error, f.model_error);
      predicted = predicted || f.model_error > 0;
    } else if (!keys.empty()) {
      text += fmt::format("\n{}  its gain cannot be predicted{}", keys, numbers);
    }
    rows.emplace_back(fmt::format("verdict {}", i + 1), text);
  }
  if (rows.empty() && wall > 0) {
    double attainable = 0;
    for (const Operation& o : slowest(profile).operations) attainable += o.attainable;
    const auto rest =
        std::max_element(split_parts.begin(), split_parts.end(), [&](const auto& a, const auto& b) {
          const auto lost = [&](double Split::*part) {
            return part == &Split::compute ? 0.0 : profile.split.*part;
          };
          return lost(a.second) < lost(b.second);
        });
    rows.emplace_back(
        "verdict",
        fmt::format("the step runs at {:.0f} % of what this machine can do with this "
                    "layout; the largest rest is {} ({})",
                    100 * attainable / wall, rest->first, percent(profile.split.*(rest->second), wall)));
  }
  if (predicted)
    rows.emplace_back("model",
                      fmt::format("its estimate of this step is off by {:.1f} %; predictions use the "
                                  "ratio of two estimates",
                                  100 * error));
  return rows.empty() ? "" : monitor::labeled_lines(rows);
}

std::string text(const Profile& profile, const OperationView& view) {
  std::string out = split_text(profile) + findings_text(profile);
  for (const std::string& part :
       {operations_text(profile, view), memory_text(profile, 3), groups_text(profile),
        profile.ranks.size() > 1 ? ranks_text(profile) : std::string()})
    if (!part.empty()) out += "\n" + part;
  return out;
}

}  // namespace nrl::profile
