// nrl-train report: the curves of one or more runs, in the terminal and as an HTML page.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/monitor/chart.h"
#include "apps/monitor/communication.h"
#include "apps/monitor/csv.h"
#include "apps/monitor/terminal.h"
#include "apps/nrl-train/commands.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/io/atomic_file.h"

namespace nrl::app {
namespace {

struct ReportArgs {
  std::vector<std::string> runs;  ///< log directories, or metrics.jsonl files
  std::string html;               ///< page to write; empty: none
  std::string csv;                ///< table to write; empty: none
  std::string by = "steps";
};

int run_report(const ReportArgs& args) {
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
                         "  nrl-train report results/first/logs results/second/logs --html compare.html");
  c->add_option("runs", args->runs, "Log directories of runs (logger.log_dir)")->required();
  c->add_option("--html", args->html, "Write a self-contained page with all curves to this file");
  c->add_option("--csv", args->csv, "Write the numbers of one run to this file, one line a step");
  c->add_option("--by", args->by, "Axis of the curves: steps | tokens | hours (of training, without pauses)")
      ->check(CLI::IsMember({"steps", "tokens", "hours"}));
  line.on(c, [args] { return run_report(*args); });
}

}  // namespace nrl::app
