#include "apps/profile/compare.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "apps/monitor/format.h"
#include "apps/monitor/html.h"
#include "apps/profile/summary.h"
#include "apps/profile/text.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/config/load.h"

namespace nrl::profile {
namespace {

// Hosts and devices of all ranks, each once.
std::string machines(const Profile& profile, std::string RankProfile::*name) {
  std::set<std::string> names;
  for (const RankProfile& r : profile.ranks) names.insert(r.*name);
  return joined(std::vector<std::string>(names.begin(), names.end()));
}

Metric exact(std::string name, double before, double after, bool lower_is_better) {
  const double ratio = before > 0 ? after / before : 1;
  return {.name = std::move(name),
          .before = before,
          .after = after,
          .ratio = {ratio, ratio},
          .lower_is_better = lower_is_better};
}

void sort_changes(std::vector<Change>& changes) {
  std::stable_sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) {
    return std::abs(a.difference()) > std::abs(b.difference());
  });
}

std::vector<Change> split_changes(const Split& before, const Split& after) {
  std::vector<Change> out;
  for (const auto& [name, part] : split_parts)
    if (before.*part != 0 || after.*part != 0) out.push_back({name, before.*part, after.*part});
  sort_changes(out);
  return out;
}

std::vector<Change> operation_changes(const RankProfile& before, const RankProfile& after) {
  std::map<std::string, Change> by_name;
  Change rest{"not in operations", before.split.wall, after.split.wall};
  for (const Operation& o : before.operations) {
    by_name[o.name].before += o.seconds;
    rest.before -= o.seconds;
  }
  for (const Operation& o : after.operations) {
    by_name[o.name].after += o.seconds;
    rest.after -= o.seconds;
  }
  std::vector<Change> out;
  for (auto& [name, change] : by_name) {
    change.name = name;
    out.push_back(std::move(change));
  }
  out.push_back(std::move(rest));
  sort_changes(out);
  return out;
}

std::string percent(double share) {
  if (std::abs(share) < 5e-4) share = 0;  // not "-0.0"
  return fmt::format("{:+.1f} %", 100 * share);
}

std::string number(const Metric& m, double value) {
  if (m.name.ends_with("_bytes")) return human_bytes(static_cast<uint64_t>(std::max(value, 0.0)));
  return m.name.ends_with("_ms") ? fmt::format("{:.2f}", value) : grouped(std::llround(value));
}

using TableRows = std::vector<std::vector<std::string>>;

TableRows change_rows(const std::vector<Change>& changes, const char* what, size_t top) {
  TableRows rows{{what, "baseline ms", "optimized ms", "difference"}};
  Change rest{.name = "others", .before = 0, .after = 0}, sum{.name = "step", .before = 0, .after = 0};
  const auto add = [&](const Change& c) {
    rows.push_back({c.name, fmt::format("{:.2f}", c.before * 1e3), fmt::format("{:.2f}", c.after * 1e3),
                    fmt::format("{:+.2f}", c.difference() * 1e3)});
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    sum.before += changes[i].before;
    sum.after += changes[i].after;
    if (i < top) {
      add(changes[i]);
    } else {
      rest.before += changes[i].before;
      rest.after += changes[i].after;
    }
  }
  if (changes.size() > top) add(rest);
  add(sum);
  return rows;
}

}  // namespace

double Metric::worse() const {
  const double ratio = before > 0 ? after / before : 1;
  return lower_is_better ? ratio - 1 : ratio > 0 ? 1 / ratio - 1 : 0;
}

Interval Metric::worse_interval() const {
  if (lower_is_better) return {ratio.low - 1, ratio.high - 1};
  return {ratio.high > 0 ? 1 / ratio.high - 1 : 0, ratio.low > 0 ? 1 / ratio.low - 1 : 0};
}

const Metric& Comparison::metric(std::string_view name) const {
  std::vector<std::string> names;
  for (const Metric& m : metrics) {
    if (m.name == name) return m;
    names.push_back(m.name);
  }
  fail(Exit::usage, "--metric {}: no such figure. Fix: one of {}", clipped(name), joined(names));
}

Comparison compare(const Profile& before, const Profile& after, bool other_machine) {
  Comparison c;
  const std::string device_a = machines(before, &RankProfile::device),
                    device_b = machines(after, &RankProfile::device),
                    host_a = machines(before, &RankProfile::host),
                    host_b = machines(after, &RankProfile::host);
  if ((device_a != device_b || host_a != host_b) && !other_machine)
    fail(Exit::usage,
         "the profiles are of different machines ({} on {}, {} on {}). Fix: measure on one machine, or "
         "--other-machine",
         device_a, host_a, device_b, host_b);
  const RankProfile &a = slowest(before), &b = slowest(after);
  const std::vector<double> steps_a = a.step_s.empty() ? std::vector{before.split.wall} : a.step_s,
                            steps_b = b.step_s.empty() ? std::vector{after.split.wall} : b.step_s;
  c.steps_before = steps_a.size();
  c.steps_after = steps_b.size();
  const double median_a = median(steps_a), median_b = median(steps_b);
  const Interval ratio = median_a > 0 && median_b > 0 ? ratio_interval(steps_a, steps_b) : Interval{1, 1};
  c.metrics.push_back({"step_ms", median_a * 1e3, median_b * 1e3, ratio, true});
  const auto tokens = [](const Profile& p, double step) {
    return step > 0 ? static_cast<double>(p.facts.tokens_per_step) / step : 0;
  };
  Metric speed = exact("tokens_per_s", tokens(before, median_a), tokens(after, median_b), false);
  if (speed.before > 0 && speed.after > 0) {
    const double per_step =
        static_cast<double>(after.facts.tokens_per_step) / static_cast<double>(before.facts.tokens_per_step);
    speed.ratio = {per_step / ratio.high, per_step / ratio.low};
    c.metrics.push_back(speed);
  }
  c.metrics.push_back(exact("peak_memory_bytes", static_cast<double>(largest(before).memory.peak),
                            static_cast<double>(largest(after).memory.peak), true));
  const auto sent = [](const RankProfile& r) {
    double bytes = 0;
    for (const GroupTime& g : r.groups) bytes += g.wire_bytes;
    return bytes;
  };
  if (sent(a) > 0 || sent(b) > 0) c.metrics.push_back(exact("sent_bytes", sent(a), sent(b), true));
  c.split = split_changes(before.split, after.split);
  c.operations = operation_changes(a, b);
  const auto fact = [&](const char* name, const std::string& of_a, const std::string& of_b) {
    if (of_a != of_b) c.facts.push_back({name, of_a, of_b});
  };
  fact("version", before.facts.version, after.facts.version);
  fact("hosts", host_a, host_b);
  fact("device", device_a, device_b);
  fact("ranks", std::to_string(before.facts.world), std::to_string(after.facts.world));
  fact("nodes", std::to_string(before.facts.nodes), std::to_string(after.facts.nodes));
  fact("threads", std::to_string(before.facts.threads), std::to_string(after.facts.threads));
  const ConfigResult config_a = load_config_text(before.facts.config, "baseline"),
                     config_b = load_config_text(after.facts.config, "optimized");
  if (before.facts.config.empty() || after.facts.config.empty())
    c.unreadable = "results of bench hold no configuration";
  else if (config_a.ok() && config_b.ok())
    c.keys = differences(config_a, config_b);
  else
    c.unreadable = fmt::format("the configuration of the {} does not load with this version",
                               config_a.ok() ? "optimized run" : "baseline");
  return c;
}

bool changes_runs(const Comparison& c) {
  return std::any_of(c.keys.begin(), c.keys.end(), [](const KeyDifference& d) {
    return !d.key.starts_with("logger.") && !d.key.starts_with("checkpointing.") &&
           !d.key.starts_with("profiling.");
  });
}

Prediction prediction_of(const std::vector<Finding>& findings, const Comparison& c) {
  const auto plain = [](std::string text) {
    std::erase(text, ' ');
    return text;
  };
  Prediction out;
  for (const Finding& f : findings) {
    const bool made = std::all_of(f.overrides.begin(), f.overrides.end(), [&](const std::string& o) {
      return std::any_of(c.keys.begin(), c.keys.end(),
                         [&](const KeyDifference& d) { return plain(o) == plain(d.key + "=" + d.b); });
    });
    if (made && f.predicted_s > 0 && f.overrides.size() > out.overrides.size())
      out = {.overrides = f.overrides, .step_s = f.predicted_s};
  }
  return out;
}

Gate judge(double worse, const Interval& interval, double allowed) {
  if (worse > allowed && !interval.contains(0)) return Gate::regression;
  if (interval.width() > allowed && interval.contains(allowed)) return Gate::unclear;
  return Gate::ok;
}

std::string slower_text(const Profile& before, const Profile& after, double allowed) {
  const Comparison c = compare(before, after, true);
  const Metric& step = c.metric("step_ms");
  if (judge(step.worse(), step.worse_interval(), allowed) != Gate::regression) return "";
  const auto most = std::max_element(c.split.begin(), c.split.end(), [](const Change& a, const Change& b) {
    return a.difference() < b.difference();
  });
  return fmt::format("steps take {:.4g} ms, {:.4g} ms in the first window ({}); most of it: {} {:+.4g} ms",
                     step.after, step.before, percent(step.worse()), most->name, most->difference() * 1e3);
}

namespace {

constexpr size_t most_operations = 10;

TableRows metric_rows(const Comparison& c) {
  TableRows rows{{"metric", "baseline", "optimized", "improvement", "95 % interval", "better"}};
  for (const Metric& m : c.metrics) {
    const Interval i = m.worse_interval();
    rows.push_back({m.name, number(m, m.before), number(m, m.after), percent(-m.worse()),
                    i.width() > 0 ? fmt::format("[{:+.1f}, {:+.1f}]", -100 * i.high, -100 * i.low) : "exact",
                    m.lower_is_better ? "lower" : "higher"});
  }
  return rows;
}

TableRows key_rows(const Comparison& c) {
  TableRows rows;
  for (const auto* list : {&c.facts, &c.keys})
    for (const KeyDifference& d : *list)
      rows.push_back({"  " + d.key, clipped(d.a, 30), "->", clipped(d.b, 30)});
  return rows;
}

/// Empty: no verdict named what was changed.
std::string prediction_text(const Comparison& c) {
  if (c.prediction.overrides.empty() || c.metrics.empty()) return "";
  double wall = 0;
  for (const Change& change : c.split) wall += change.before;
  return fmt::format("{}: predicted {}, measured {}", joined(c.prediction.overrides, " "),
                     percent(c.prediction.step_s / wall - 1), percent(c.metrics.front().worse()));
}

std::string html_table(const TableRows& rows) {
  std::string out = "<table>\n";
  for (size_t i = 0; i < rows.size(); ++i) {
    out += "<tr>";
    const char* const tag = i == 0 ? "th" : "td";
    for (const std::string& cell : rows[i])
      out += fmt::format("<{0}>{1}</{0}>", tag, monitor::html_escaped(cell));
    out += "</tr>\n";
  }
  return out + "</table>\n";
}

}  // namespace

std::string text(const Comparison& c) {
  std::string out = aligned(metric_rows(c), 1, true);
  if (const std::string prediction = prediction_text(c); !prediction.empty())
    out += monitor::labeled_lines({{"verdict", prediction}});
  out += "\n" + aligned(change_rows(c.split, "part of the step", c.split.size()), 1);
  out += "\n" + aligned(change_rows(c.operations, "operation", most_operations), 1);
  out += "\nwhat changed\n";
  const TableRows keys = key_rows(c);
  out += keys.empty() ? "  nothing that the profiles hold\n" : aligned(keys, 4);
  if (!c.unreadable.empty()) out += "  " + c.unreadable + "\n";
  return out;
}

std::string html_page(const Comparison& c) {
  std::string page = monitor::page_begin("Comparison of two profiles", "nrl-train profile compare");
  page += html_table(metric_rows(c));
  if (const std::string prediction = prediction_text(c); !prediction.empty())
    page += fmt::format("<p>{}</p>\n", monitor::html_escaped(prediction));
  page += "<h2>The step</h2>\n" + html_table(change_rows(c.split, "part", c.split.size()));
  page += "<h2>Operations</h2>\n" + html_table(change_rows(c.operations, "operation", c.operations.size()));
  page += "<h2>What changed</h2>\n";
  TableRows keys = key_rows(c);
  keys.insert(keys.begin(), {"key", "baseline", "", "optimized"});
  page += keys.size() > 1 ? html_table(keys) : "<p>nothing that the profiles hold</p>\n";
  if (!c.unreadable.empty()) page += fmt::format("<p>{}</p>\n", monitor::html_escaped(c.unreadable));
  return page + std::string(monitor::page_end);
}

std::string gate_text(const Comparison& c, const Metric& m, double allowed) {
  const Interval i = m.worse_interval();
  std::string out = fmt::format("gate: {} {} worse [{:+.1f}, {:+.1f}], allowed {}: ", m.name,
                                percent(m.worse()), 100 * i.low, 100 * i.high, percent(allowed));
  switch (judge(m.worse(), i, allowed)) {
    case Gate::ok:
      return out + "ok";
    case Gate::unclear: {
      // The width of an interval falls with the root of the number of values.
      const double factor = std::pow(i.width() / allowed, 2);
      const auto steps = static_cast<double>(std::min(c.steps_before, c.steps_after));
      return out + fmt::format("unclear. Fix: profile about {} steps of both",
                               grouped(std::llround(std::ceil(factor * steps))));
    }
    case Gate::regression:
      break;
  }
  out += "regression";
  const auto most =
      std::max_element(c.operations.begin(), c.operations.end(),
                       [](const auto& a, const auto& b) { return a.difference() < b.difference(); });
  if (most != c.operations.end() && most->difference() > 0)
    out += fmt::format("; most of it: {} {:+.2f} ms", most->name, most->difference() * 1e3);
  return out;
}

JsonValue to_json(const Comparison& c) {
  JsonValue metrics = JsonValue::array(), keys = JsonValue::array();
  for (const Metric& m : c.metrics) {
    const Interval i = m.worse_interval();
    metrics.push_back(JsonValue::object({{"name", m.name},
                                         {"baseline", m.before},
                                         {"optimized", m.after},
                                         {"speedup", 1 / (1 + m.worse())},
                                         {"improvement_percent", -100 * m.worse()},
                                         {"low_percent", -100 * i.high},
                                         {"high_percent", -100 * i.low},
                                         {"lower_is_better", m.lower_is_better}}));
  }
  const auto changes = [](const std::vector<Change>& list) {
    JsonValue out = JsonValue::array();
    for (const Change& change : list)
      out.push_back(JsonValue::object({{"name", change.name},
                                       {"baseline_s", change.before},
                                       {"optimized_s", change.after},
                                       {"difference_s", change.difference()}}));
    return out;
  };
  for (const auto* list : {&c.facts, &c.keys})
    for (const KeyDifference& d : *list)
      keys.push_back(JsonValue::object({{"key", d.key}, {"baseline", d.a}, {"optimized", d.b}}));
  JsonValue overrides = JsonValue::array();
  for (const std::string& o : c.prediction.overrides) overrides.push_back(o);
  return JsonValue::object({{"metrics", std::move(metrics)},
                            {"predicted_step_s", c.prediction.step_s},
                            {"overrides", std::move(overrides)},
                            {"split", changes(c.split)},
                            {"operations", changes(c.operations)},
                            {"changed", std::move(keys)}});
}

}  // namespace nrl::profile
