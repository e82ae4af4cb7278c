// nrl-train report: the curves of one or more runs, in the terminal and as an HTML page.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/bench/history.h"
#include "apps/monitor/chart.h"
#include "apps/monitor/communication.h"
#include "apps/monitor/csv.h"
#include "apps/monitor/terminal.h"
#include "apps/nrl-train/commands.h"
#include "apps/planner/run_comparison.h"
#include "apps/profile/compare.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"

namespace nrl::app {
namespace {

struct ReportArgs {
  std::vector<std::string> runs;  ///< log directories, or metrics.jsonl files
  std::string html;               ///< page to write; empty: none
  std::string csv;                ///< table to write; empty: none
  std::string by = "steps";
  std::string history;  ///< file of figures of benchmarks; empty: none
  std::string against;  ///< another one, measured in turns with it; empty: none
  double allowed_percent = 5;
  bool predicted = false;     ///< compare with the estimate
  planner::RunToCompare run;  ///< for this
  std::string profile_out;    ///< profile of measured rates to write; empty: none
};

int report_predicted(const ReportArgs& args) {
  if (args.runs.size() != 1)
    fail(Exit::usage, "--predicted compares one run with its estimate, but there are {}. Fix: give one run",
         args.runs.size());
  if (!args.html.empty() || !args.csv.empty() || !args.against.empty())
    fail(Exit::usage, "--predicted draws nothing. Fix: leave out {}",
         !args.html.empty()  ? "--html"
         : !args.csv.empty() ? "--csv"
                             : "--against");
  planner::RunToCompare run = args.run;
  run.log_dir = args.runs.front();
  const planner::RunComparison compared = planner::compare_with_run(run);
  std::fputs(planner::text_of(compared).c_str(), stdout);
  if (args.profile_out.empty()) return 0;
  if (!compared.profile)
    fail(Exit::no_input,
         "--profile-out: {} has no window of recorded steps, whose calls the profile is made of. Fix: train "
         "with "
         "profiling.enabled=true",
         run.log_dir);
  write_file_atomic(args.profile_out, machine::to_json(*compared.profile));
  for (const std::string& operation : compared.left_out) log::info("not in the profile: {}", operation);
  log::info("wrote {}: {} of calls", args.profile_out,
            counted(static_cast<int64_t>(compared.profile->calls.size()), "time"));
  return 0;
}

int report_history(const ReportArgs& args) {
  const std::vector<bench::HistoryEntry> entries = bench::load_history(args.history);
  if (args.against.empty()) {
    std::fputs(bench::history_text(entries).c_str(), stdout);
    return 0;
  }
  const std::vector<bench::GateRow> rows =
      bench::gate(bench::load_history(args.against), entries, args.allowed_percent / 100);
  std::fputs(bench::text(rows).c_str(), stdout);
  const bool worse = std::any_of(rows.begin(), rows.end(), [](const bench::GateRow& r) {
    return r.verdict == bench::GateRow::Verdict::regression;
  });
  return worse ? profile::exit_regression : 0;
}

int run_report(const ReportArgs& args) {
  if (args.history.empty() == args.runs.empty())
    fail(Exit::usage, "{}",
         args.runs.empty() ? "report needs a log directory of a run, or --history FILE"
                           : "report draws runs or, with --history, benchmarks. Fix: leave one out");
  if (!args.predicted &&
      (args.run.device != "auto" || !args.run.profile.empty() || !args.profile_out.empty()))
    fail(Exit::usage, "{} is for --predicted. Fix: add it, or leave the option out",
         args.run.device != "auto"   ? "--device"
         : !args.run.profile.empty() ? "--profile"
                                     : "--profile-out");
  if (!args.history.empty()) {
    if (args.predicted) fail(Exit::usage, "--predicted compares a run. Fix: leave out --history");
    return report_history(args);
  }
  if (args.predicted) return report_predicted(args);
  if (!args.against.empty())
    fail(Exit::usage, "--against has no effect without --history. Fix: add --history FILE");
  if (!args.csv.empty() && args.runs.size() != 1)
    fail(Exit::usage, "--csv writes the table of one run, but there are {}. Fix: give one run",
         args.runs.size());
  const monitor::By by = args.by == "hours"    ? monitor::By::hours
                         : args.by == "tokens" ? monitor::By::tokens
                                               : monitor::By::steps;
  std::vector<monitor::RunHistory> runs;
  for (const std::string& path : args.runs) runs.push_back(monitor::load_history(path));
  const int terminal = monitor::terminal_columns(STDOUT_FILENO), columns = terminal > 0 ? terminal : 80;
  const std::string chart =
      monitor::text_chart(runs, &monitor::RunHistory::loss, std::clamp(columns - 16, 20, 120), 14, by);
  std::fputs((chart + (chart.empty() ? "" : "\n") + monitor::text_table(runs)).c_str(), stdout);
  for (const monitor::RunHistory& run : runs)
    if (!run.layers.empty())
      std::fputs(fmt::format("\nlayers of {}, step {}\n{}", run.name, run.layers.back().step,
                             monitor::text_lines(run.layers.back().table))
                     .c_str(),
                 stdout);
  for (const std::string& path : args.runs) {
    const std::string file = join_path(path, monitor::communication_file);
    if (!path_exists(file)) continue;
    const monitor::Communication c =
        monitor::communication_from(parse_json(read_file(file, 1 << 20), file), file);
    std::fputs(fmt::format("\ncommunication of {}, per step of {} (rank 0)\n{}", path, c.steps,
                           monitor::text_table(c))
                   .c_str(),
               stdout);
  }
  if (!args.html.empty()) {
    write_file_atomic(args.html, monitor::html_report(runs, by));
    log::info("wrote {}", args.html);
  }
  if (!args.csv.empty()) {
    write_file_atomic(args.csv, monitor::metrics_csv(args.runs[0]));
    log::info("wrote {}", args.csv);
  }
  return 0;
}

}  // namespace

void add_report(CommandLine& line) {
  const auto args = std::make_shared<ReportArgs>();
  CLI::App* c = line.add("report", "Draw the loss and other curves of one or more runs",
                         "  nrl-train report results/quickstart/logs\n"
                         "  nrl-train report results/quickstart/logs --predicted --profile-out profile.json\n"
                         "  nrl-train report results/first/logs results/second/logs --html compare.html");
  c->add_option("runs", args->runs, "Log directories of runs (logger.log_dir)");
  c->add_option("--html", args->html, "Write a self-contained page with all curves to this file");
  c->add_option("--csv", args->csv, "Write the numbers of one run to this file, one line a step");
  c->add_option("--by", args->by, "Axis of the curves: steps | tokens | hours (of training, without pauses)")
      ->check(CLI::IsMember({"steps", "tokens", "hours"}));
  c->add_option("--history", args->history,
                "Instead of runs: figures of bench step --history over commits, and where they changed");
  c->add_option(
      "--against", args->against,
      "With --history: compare it with this file of another version, measured in turns; exits with 3\n"
      "for a regression");
  c->add_option("--fail-on-regression", args->allowed_percent, "Of --against: percent allowed (default 5)")
      ->check(finite_range(0, 1e6));
  c->add_flag("--predicted", args->predicted,
              "Compare the step with its estimate by nrl-train plan, part by part");
  c->add_option(
      "--device", args->run.device,
      "--predicted: the device of the run: auto (as configured), cpu, cuda, or a GPU that is not here: " +
          machine::device_model_names());
  c->add_option("--profile", args->run.profile, "--predicted: estimate with these rates, as nrl-train plan")
      ->type_name("FILE");
  c->add_option("--profile-out", args->profile_out,
                "--predicted: write the rates that the run's last window of profiling has measured, for\n"
                "nrl-train plan --profile")
      ->type_name("FILE");
  line.on(c, [args] { return run_report(*args); });
}

}  // namespace nrl::app
