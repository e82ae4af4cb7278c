// nrl-train profile: reads profile.json, prints its tables, and compares two of them.

#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/nrl-train/commands.h"
#include "apps/planner/advice.h"
#include "apps/profile/compare.h"
#include "apps/profile/json.h"
#include "apps/profile/text.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/io/atomic_file.h"

namespace nrl::app {
namespace {

struct ShowArgs {
  std::string path;
  size_t top = 10;
  std::optional<double> threshold_ms;  ///< unset: the command's own
  std::string by = "name";
  bool json = false;
};

struct CompareArgs {
  std::string before, after;
  std::string metric = "step_ms";
  double allowed = 0;  ///< percent
  bool gate = false, other_machine = false;
  std::string json, html;
};

profile::OperationView view_of(const ShowArgs& args) {
  using By = profile::OperationView::By;
  return {.by = args.by == "part"    ? By::part
                : args.by == "layer" ? By::layer
                                     : By::name,
          .top = args.top,
          .threshold_ms = args.threshold_ms.value_or(0)};
}

using Print = std::string(const profile::Profile&, const ShowArgs&);

// `member` of profile.json is what --json prints; null: all of it.
int show(const ShowArgs& args, const char* member, Print* print, bool advise) {
  profile::Profile profile = profile::load_profile(args.path);
  if (advise) planner::advise(profile);
  std::string text;
  if (args.json) {
    const JsonValue json = profile::to_json(profile);
    text = (member ? json.at(member) : json).dump(2) + "\n";
  } else {
    text = print(profile, args);
    if (text.empty()) text = "none\n";
  }
  std::fputs(text.c_str(), stdout);
  return 0;
}

int run_compare(const CompareArgs& args) {
  if (!args.gate && args.metric != "step_ms")
    fail(Exit::usage, "--metric names the figure of the gate. Fix: add --fail-on-regression PERCENT");
  profile::Profile before = profile::load_steps(args.before);
  profile::Comparison comparison =
      profile::compare(before, profile::load_steps(args.after), args.other_machine);
  if (profile::changes_runs(comparison)) {
    planner::advise(before);
    comparison.prediction = profile::prediction_of(before.findings, comparison);
  }
  std::fputs(profile::text(comparison).c_str(), stdout);
  if (!args.json.empty()) {
    write_file_atomic(args.json, profile::to_json(comparison).dump(2) + "\n");
    log::info("wrote {}", args.json);
  }
  if (!args.html.empty()) {
    write_file_atomic(args.html, profile::html_page(comparison));
    log::info("wrote {}", args.html);
  }
  if (!args.gate) return 0;
  const profile::Metric& metric = comparison.metric(args.metric);
  const double allowed = args.allowed / 100;
  std::fputs(("\n" + profile::gate_text(comparison, metric, allowed) + "\n").c_str(), stdout);
  const bool worse =
      profile::judge(metric.worse(), metric.worse_interval(), allowed) == profile::Gate::regression;
  return worse ? profile::exit_regression : 0;
}

void add_show(CommandLine& line, CLI::App* group, const char* name, const char* about, const char* member,
              Print* print, bool operations) {
  const auto args = std::make_shared<ShowArgs>();
  // Predictions take a while: the tables of one kind do without.
  const bool advise = !member || std::string_view(member) == "bottlenecks";
  CLI::App* c =
      line.add(name, about, std::string("  nrl-train profile ") + name + " results/quickstart/logs", group);
  c->add_option("dir", args->path, "Log directory, LOG_DIR/profile/step-N, or a profile.json")->required();
  c->add_option("--top", args->top, "Rows of the table; 0: all (default 10)")->check(CLI::Range(0, 100000));
  if (operations) {
    c->add_option("--threshold-ms", args->threshold_ms, "Only operations whose calls take longer on average")
        ->check(finite_range(0, 1e9));
    c->add_option("--by", args->by, "Rows: name (of the kernel), part (of the step) or layer")
        ->check(CLI::IsMember({"name", "part", "layer"}));
  }
  c->add_flag("--json", args->json, "Print JSON");
  line.on(c, [args, member, print, advise] { return show(*args, member, print, advise); });
}

void add_compare(CommandLine& line, CLI::App* group) {
  const auto args = std::make_shared<CompareArgs>();
  CLI::App* c =
      line.add("compare", "Compare two profiles; with a gate, exit with 3 if the second one is slower",
               "  nrl-train profile compare results/before/logs results/after/logs\n"
               "  nrl-train profile compare results/before/logs results/after/logs --fail-on-regression 10",
               group);
  c->add_option("baseline", args->before,
                "Log directory, LOG_DIR/profile/step-N, a profile.json, or a file of bench step --json")
      ->required();
  c->add_option("optimized", args->after, "The profile to compare with it")->required();
  c->add_option("--metric", args->metric,
                "Figure of the gate: step_ms, tokens_per_s, peak_memory_bytes, sent_bytes (default step_ms)");
  CLI::Option* gate =
      c->add_option("--fail-on-regression", args->allowed,
                    "Exit with 3 if the figure got worse by more than this many percent, and the\n"
                    "95 % interval excludes 0")
          ->check(finite_range(0, 1e6));
  c->add_flag("--other-machine", args->other_machine, "Compare runs of different machines all the same");
  c->add_option("--json", args->json, "Write the comparison to this file");
  c->add_option("--html", args->html, "Write it as a page");
  line.on(c, [args, gate] {
    args->gate = gate->count() > 0;
    return run_compare(*args);
  });
}

}  // namespace

void print_profile(const std::string& path) {
  profile::Profile profile = profile::load_profile(path);
  planner::advise(profile);
  std::fputs(("\n" + profile::text(profile)).c_str(), stdout);
}

void add_profile(CommandLine& line) {
  CLI::App* group = line.add("profile", "Show where the time and the memory of a step go",
                             "  nrl-train profile show results/quickstart/logs\n"
                             "  nrl-train profile compare results/before/logs results/after/logs");
  group->require_subcommand(1);
  add_show(
      line, group, "show", "Print all tables of a profile", nullptr,
      [](const profile::Profile& p, const ShowArgs& a) { return profile::text(p, view_of(a)); }, true);
  add_show(
      line, group, "ops", "Print operations, the ones that lose most time first", "operations",
      [](const profile::Profile& p, const ShowArgs& a) { return profile::operations_text(p, view_of(a)); },
      true);
  add_show(
      line, group, "kernels", "Print the kernels whose calls take longer than a threshold, by default 1 ms",
      "operations",
      [](const profile::Profile& p, const ShowArgs& a) {
        profile::OperationView view = view_of(a);
        view.threshold_ms = a.threshold_ms.value_or(1);
        return profile::operations_text(p, view);
      },
      true);
  add_show(
      line, group, "memory", "Print what memory holds at its peak", "memory",
      [](const profile::Profile& p, const ShowArgs& a) { return profile::memory_text(p, a.top); }, false);
  add_show(
      line, group, "comm", "Print communication by group and operation", "communication",
      [](const profile::Profile& p, const ShowArgs&) { return profile::groups_text(p); }, false);
  add_show(
      line, group, "ranks", "Print ranks beside each other, to find stragglers", "ranks",
      [](const profile::Profile& p, const ShowArgs&) { return profile::ranks_text(p); }, false);
  add_show(
      line, group, "bottlenecks", "Print what costs time, and the keys that may mend it", "bottlenecks",
      [](const profile::Profile& p, const ShowArgs&) { return profile::findings_text(p); }, false);
  add_compare(line, group);
}

}  // namespace nrl::app
