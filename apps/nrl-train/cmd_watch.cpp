// nrl-train watch: runs as they are now, from the files in their log directories.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/monitor/terminal.h"
#include "apps/monitor/timers.h"
#include "apps/monitor/watch.h"
#include "apps/nrl-train/commands.h"
#include "core/config/load.h"
#include "core/io/atomic_file.h"

namespace nrl::app {
namespace {

struct WatchArgs {
  std::vector<std::string> runs;  ///< log directories
  bool once = false;
  double interval = 1;  ///< seconds
};

int terminal_rows() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_row : 0;
}

// Unknown if the run counts its length in epochs.
std::optional<int64_t> planned_steps(const std::string& directory) {
  const std::string file = join_path(directory, "config.yaml");
  if (!path_exists(file)) return {};
  return resolved_loop(load_config(file).config).max_num_steps;
}

int run_watch(const WatchArgs& args) {
  std::vector<monitor::WatchedRun> runs;
  for (const std::string& directory : args.runs) {
    runs.emplace_back(directory);
    runs.back().max_steps = planned_steps(directory);
  }
  const char* term = std::getenv("TERM");
  const bool redraws =
      !args.once && monitor::terminal_columns(STDOUT_FILENO) > 0 && term && std::string_view(term) != "dumb";
  if (redraws) std::fputs("\x1b[2J", stdout);
  for (;;) {
    for (monitor::WatchedRun& run : runs) run.update();
    int columns = monitor::terminal_columns(STDOUT_FILENO);
    if (const char* wanted = std::getenv("COLUMNS"); columns == 0 && wanted) columns = std::atoi(wanted);
    const std::string text = monitor::watch_text(runs, columns > 0 ? columns : 80,
                                                 redraws ? terminal_rows() - 1 : 0, monitor::wall_seconds());
    if (redraws) {
      // Home, every line cleared behind its text, everything below cleared: no flicker.
      std::string frame = "\x1b[H";
      for (const char c : text) frame += c == '\n' ? "\x1b[K\n" : std::string(1, c);
      std::fputs((frame + "\x1b[J").c_str(), stdout);
    } else {
      std::fputs(text.c_str(), stdout);
    }
    std::fflush(stdout);
    if (args.once || std::ferror(stdout)) return 0;
    std::this_thread::sleep_for(std::chrono::duration<double>(args.interval));
  }
}

}  // namespace

void add_watch(CommandLine& line) {
  const auto args = std::make_shared<WatchArgs>();
  CLI::App* c = line.add("watch", "Show runs as they are now: progress, curves, machines, ranks and alerts",
                         "  nrl-train watch results/quickstart/logs\n"
                         "  nrl-train watch results/first/logs results/second/logs --once");
  c->add_option("runs", args->runs, "Log directories of runs (logger.log_dir)")->required();
  c->add_flag("--once", args->once, "Print the present state and end");
  c->add_option("--interval", args->interval, "Seconds between updates")->check(finite_range(0.1, 3600));
  line.on(c, [args] { return run_watch(*args); });
}

}  // namespace nrl::app
