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
};

int run_report(const ReportArgs& args) {
  std::vector<monitor::RunHistory> runs;
  for (const std::string& path : args.runs) runs.push_back(monitor::load_history(path));
  const int terminal = monitor::terminal_columns(STDOUT_FILENO), columns = terminal > 0 ? terminal : 80;
  const std::string chart =
      monitor::text_chart(runs, &monitor::RunHistory::loss, std::clamp(columns - 16, 20, 120), 14);
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
    write_file_atomic(args.html, monitor::html_report(runs));
    log::info("wrote {}", args.html);
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
  line.on(c, [args] { return run_report(*args); });
}

}  // namespace nrl::app
