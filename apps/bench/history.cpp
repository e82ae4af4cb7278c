#include "apps/bench/history.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <tuple>
#include <utility>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/base/text.h"
#include "core/io/append_file.h"
#include "core/io/atomic_file.h"

namespace nrl::bench {
namespace {

constexpr size_t least_side = 5, least_pairs = 5, last_values = 3;
constexpr int permutations = 999;
constexpr double exact_allowed = 0.01, slow_probe = 0.9, significant = 0.01;
constexpr uint64_t most_history = 256 << 20;

using Series = std::tuple<std::string, std::string, std::string>;  // metric, configuration, machine

std::map<Series, std::vector<const HistoryEntry*>> series_of(std::span<const HistoryEntry> entries) {
  std::map<Series, std::vector<const HistoryEntry*>> out;
  for (const HistoryEntry& e : entries) out[{e.metric, e.config, e.machine}].push_back(&e);
  return out;
}

/// A division of values, and how far the ranks of its parts differ (Pettitt 1979, weighted by their sizes).
struct Division {
  size_t at = least_side;
  double size = 0;
};

/// The division that stands out most. Ranks, because a few disturbed measurements are far off.
Division largest_division(std::span<const double> ranks) {
  const auto n = static_cast<double>(ranks.size());
  Division best;
  double sum = 0;
  for (size_t at = 0; at + least_side <= ranks.size(); ++at) {
    const auto left = static_cast<double>(at);
    const double size = std::abs(sum) / std::sqrt(std::max(left * (n - left), 1.0));
    if (at >= least_side && size > best.size) best = {at, size};
    sum += ranks[at] - (n + 1) / 2;
  }
  return best;
}

/// From 1; equal values share their mean rank.
std::vector<double> ranks_of(std::span<const double> values) {
  std::vector<double> sorted(values.begin(), values.end()), out;
  std::sort(sorted.begin(), sorted.end());
  for (const double v : values) {
    const auto [first, last] = std::equal_range(sorted.begin(), sorted.end(), v);
    out.push_back(static_cast<double>((first - sorted.begin()) + (last - sorted.begin()) + 1) / 2);
  }
  return out;
}

std::string day(double time) {
  const auto seconds = static_cast<std::time_t>(time);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  return fmt::format("{:04}-{:02}-{:02}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
}

}  // namespace

JsonValue to_json(const HistoryEntry& e) {
  return JsonValue::object({{"metric", e.metric},
                            {"config", e.config},
                            {"machine", e.machine},
                            {"commit", e.commit},
                            {"time", e.time},
                            {"value", e.value},
                            {"low", e.interval.low},
                            {"high", e.interval.high},
                            {"probe", e.probe}});
}

void append_history(const std::string& path, std::span<const HistoryEntry> entries) {
  std::string lines;
  for (const HistoryEntry& e : entries) lines += to_json(e).dump() + "\n";
  AppendFile(path).append(lines);
}

std::vector<HistoryEntry> load_history(const std::string& path) {
  const std::string text = read_file(path, most_history);
  std::vector<HistoryEntry> out;
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string place = fmt::format("{}:{}", path, ++number);
    const JsonValue json = parse_json(text.substr(begin, end - begin), place);
    HistoryEntry e{.metric = json.get_string("metric"),
                   .config = json.get_string("config"),
                   .machine = json.get_string("machine"),
                   .commit = json.get_string("commit"),
                   .time = json.get_double("time"),
                   .value = json.get_double("value"),
                   .interval = {json.get_double("low"), json.get_double("high")},
                   .probe = json.get_double("probe")};
    if (!(e.value > 0) || !std::isfinite(e.value) || !(e.probe >= 0) || !std::isfinite(e.probe))
      fail(Exit::data,
           "{}: value {} and probe {}; expected a positive value and a probe of at least 0. Fix: remove "
           "the line",
           place, e.value, e.probe);
    out.push_back(std::move(e));
    begin = end + 1;
  }
  return out;
}

std::optional<ChangePoint> find_change(std::span<const double> values) {
  if (values.size() < 2 * least_side) return std::nullopt;
  std::vector<double> ranks = ranks_of(values);
  const auto [at, size] = largest_division(ranks);
  if (size == 0) return std::nullopt;
  int as_large = 0;
  for (int p = 0; p < permutations; ++p) {
    const PhiloxStream random(static_cast<uint64_t>(p), "change");
    for (size_t i = ranks.size(); i-- > 1;)
      std::swap(ranks[i],
                ranks[std::min(static_cast<size_t>(random.uniform(i) * static_cast<float>(i + 1)), i)]);
    as_large += largest_division(ranks).size >= size ? 1 : 0;
  }
  const auto middle_of = values.begin() + static_cast<long>(at);
  const double before = median({values.begin(), middle_of}), after = median({middle_of, values.end()});
  const ChangePoint change{.at = at, .ratio = after / before, .p = (as_large + 1.0) / (permutations + 1)};
  const double middle = std::sqrt(before * after);
  const bool lasts = std::all_of(values.end() - last_values, values.end(),
                                 [&](double v) { return after > before ? v > middle : v < middle; });
  return change.p < significant && lasts ? std::optional(change) : std::nullopt;
}

std::string history_text(std::span<const HistoryEntry> entries) {
  std::string out;
  for (const auto& [series, list] : series_of(entries)) {
    const auto& [metric, config, machine] = series;
    std::vector<double> values;
    for (const HistoryEntry* e : list) values.push_back(e->relative());
    const HistoryEntry& last = *list.back();
    out += fmt::format(
        "{} of {}\n  on {}\n  {} entries, last {:.5g} [{:.5g}, {:.5g}] ({}, {}), {:+.1f} % to the median",
        metric, config, machine, list.size(), last.value, last.interval.low, last.interval.high, last.commit,
        day(last.time), 100 * (values.back() / median(values) - 1));
    if (const auto change = find_change(values)) {
      const HistoryEntry& from = *list[change->at];
      out +=
          fmt::format("\n  {} by {:.1f} % from {} ({}) on, p {:.3f}", change->ratio > 1 ? "worse" : "better",
                      100 * std::abs(change->ratio - 1), from.commit, day(from.time), change->p);
    }
    out += "\n";
  }
  return out;
}

std::vector<GateRow> gate(std::span<const HistoryEntry> before, std::span<const HistoryEntry> after,
                          double allowed) {
  const auto a = series_of(before), b = series_of(after);
  std::vector<GateRow> out;
  for (const auto& [series, olds] : a) {
    const auto found = b.find(series);
    if (found == b.end()) continue;
    const std::vector<const HistoryEntry*>& news = found->second;
    const bool exact = olds.front()->exact();
    GateRow row{.name = std::get<0>(series) + " of " + std::get<1>(series),
                .interval = {},
                .allowed = exact ? exact_allowed : allowed};
    double best = 0;
    for (const auto* list : {&olds, &news})
      for (const HistoryEntry* e : *list) best = std::max(best, e->probe);
    std::vector<double> x, y, ratios;
    for (size_t i = 0; i < std::min(olds.size(), news.size()); ++i) {
      if (std::min(olds[i]->probe, news[i]->probe) < slow_probe * best) continue;
      x.push_back(olds[i]->value);
      y.push_back(news[i]->value);
      ratios.push_back(y.back() / x.back());
    }
    row.pairs = x.size();
    if (exact || row.pairs >= least_pairs) {
      row.worse = median(ratios) - 1;
      const Interval ratio = exact ? Interval{1 + row.worse, 1 + row.worse} : paired_ratio_interval(x, y);
      row.interval = {ratio.low - 1, ratio.high - 1};
      row.verdict = profile::judge(row.worse, row.interval, row.allowed);
    }
    out.push_back(std::move(row));
  }
  if (out.empty())
    fail(Exit::usage, "the histories have no figure of the same configuration and machine in common");
  return out;
}

std::string text(std::span<const GateRow> rows) {
  std::string out;
  for (const GateRow& r : rows) {
    out += fmt::format("gate: {}: ", r.name);
    if (r.pairs < least_pairs && r.interval.width() == 0 && r.verdict == GateRow::Verdict::unclear)
      out +=
          fmt::format("unclear: {} of at least {} pairs on an undisturbed machine\n", r.pairs, least_pairs);
    else
      out +=
          fmt::format("{:+.1f} % [{:+.1f}, {:+.1f}] in {}, allowed {:+.1f} %: {}\n", 100 * r.worse,
                      100 * r.interval.low, 100 * r.interval.high, counted(r.pairs, "pair"), 100 * r.allowed,
                      r.verdict == GateRow::Verdict::ok           ? "ok"
                      : r.verdict == GateRow::Verdict::regression ? "regression"
                                                                  : "unclear");
  }
  return out;
}

}  // namespace nrl::bench
