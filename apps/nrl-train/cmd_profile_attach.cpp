// nrl-train profile attach: some steps of a run that is under way, recorded.

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <thread>

#include <CLI/CLI.hpp>

#include "apps/monitor/format.h"
#include "apps/nrl-train/commands.h"
#include "apps/profile/json.h"
#include "apps/profile/request.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/io/atomic_file.h"

namespace nrl::app {
namespace {

namespace fs = std::filesystem;

struct AttachArgs {
  std::string log_dir;
  int64_t steps = profile::requested_steps;
  double timeout = 600;
};

/// When each window was written, by its directory.
std::map<std::string, fs::file_time_type> windows_of(const std::string& log_dir) {
  std::map<std::string, fs::file_time_type> out;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(join_path(log_dir, "profile"), error)) {
    std::error_code missing;
    const auto written = fs::last_write_time(entry.path() / profile::profile_file, missing);
    if (!missing) out.emplace(entry.path().string(), written);
  }
  return out;
}

/// "; the last row is 14 min old"
std::string age_of_rows(const std::string& metrics) {
  std::error_code error;
  const auto written = fs::last_write_time(metrics, error);
  if (error) return "";
  const std::chrono::duration<double> age = fs::file_time_type::clock::now() - written;
  return fmt::format("; the last row of {} is {:.0f} s old", metrics, age.count());
}

int run_attach(const AttachArgs& args) {
  const std::string metrics = join_path(args.log_dir, "metrics.jsonl");
  if (!path_exists(metrics))
    fail(Exit::no_input, "{}: no metrics.jsonl. Fix: give the log directory of a run that is under way",
         args.log_dir);
  const auto before = windows_of(args.log_dir);
  profile::write_request(args.log_dir, args.steps);
  log::info("asked for {} steps; waiting for the run", args.steps);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(args.timeout);
  while (std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (const auto& [directory, written] : windows_of(args.log_dir)) {
      const auto known = before.find(directory);
      if (known != before.end() && known->second == written) continue;
      std::fputs((directory + "\n").c_str(), stdout);
      print_profile(directory);
      return 0;
    }
  }
  profile::remove_request(args.log_dir);
  fail(Exit::unavailable, "profile attach: no answer from {} in {:g} s{}", args.log_dir, args.timeout,
       age_of_rows(metrics));
}

}  // namespace

void add_profile_attach(CommandLine& line) {
  const auto args = std::make_shared<AttachArgs>();
  CLI::App* c =
      line.add("attach", "Record some steps of a run that is under way, and print them",
               "  nrl-train profile attach results/quickstart/logs --steps 5", line.find("profile"));
  c->add_option("logs", args->log_dir, "The run's log directory")->required();
  c->add_option("--steps", args->steps, "Steps to record (default 3)")
      ->check(CLI::Range(int64_t{1}, profile::most_requested_steps));
  c->add_option("--timeout", args->timeout, "Seconds to wait for them (default 600)")
      ->check(finite_range(0.1, 1e6));
  line.on(c, [args] { return run_attach(*args); });
}

}  // namespace nrl::app
