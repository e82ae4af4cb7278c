// Parses the command line.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/nrl-train/commands.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/memory.h"
#include "core/device/cpu/threads.h"
#include "parallel/comm/world/world.h"

namespace nrl::app {

AddCommand add_train, add_plan, add_verify, add_prepare, add_data, add_generate, add_eval, add_report,
    add_explain, add_recipes, add_checkpoint, add_bench, add_tune, add_profile, add_profile_run,
    add_profile_attach, add_diagnose, add_doctor, add_watch, add_launch;

namespace {

// In the order of --help.
constexpr AddCommand* commands[] = {
    add_train, add_launch,  add_plan,        add_verify,         add_prepare,  add_data,       add_generate,
    add_eval,  add_report,  add_watch,       add_explain,        add_recipes,  add_checkpoint, add_bench,
    add_tune,  add_profile, add_profile_run, add_profile_attach, add_diagnose, add_doctor};

// The exit code of a rank above 0 whose command line is wrong. Rank 0 prints the error for all ranks and must
// be the first to exit: a launcher kills all ranks soon after the first exit (Open MPI 5 after 0.3 s).
int leave_after_rank_0() {
  std::this_thread::sleep_for(std::chrono::seconds(3));
  return static_cast<int>(Exit::usage);
}

// `nrl-train run.yaml ...` means `nrl-train train run.yaml ...`.
std::vector<std::string> with_default_command(int argc, char** argv, CLI::App& app) {
  std::vector<std::string> args(argv + 1, argv + argc);
  if (args.empty()) return args;
  const bool names_config = args.front() == "--config" || args.front().starts_with("--config=");
  if (args.front().starts_with("-") && !names_config) return args;
  std::vector<std::string_view> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  if (std::find(names.begin(), names.end(), args.front()) != names.end()) return args;
  const bool looks_like_config = names_config || args.front().find_first_of("./") != std::string::npos;
  if (!looks_like_config) {
    fail(Exit::usage, "'{}' is neither a command nor a configuration file{}. Fix: see nrl-train --help",
         args.front(), did_you_mean(nearest(args.front(), names), "; "));
  }
  args.insert(args.begin(), "train");
  return args;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Trains transformer language models from a YAML file, alone or under mpirun or srun.\n"
      "  nrl-train CONFIG.yaml [key=value ...]       trains\n"
      "  mpirun -n 8 nrl-train CONFIG.yaml           trains on 8 ranks",
      "nrl-train");
  app.set_version_flag("--version", std::string("nrl-train ") + NRL_VERSION);
  app.require_subcommand(1);
  CommandLine line(app);
  for (AddCommand* add : commands) add(line);

  try {
    std::vector<std::string> args = with_default_command(argc, argv, app);
    if (args.empty()) {
      std::fputs(app.help().c_str(), stderr);
      return static_cast<int>(Exit::usage);
    }
    std::reverse(args.begin(), args.end());  // CLI11 takes them from the back
    app.parse(args);
  } catch (const CLI::ParseError& e) {
    std::ostringstream out, problem;  // the message quotes the command line
    const int code = app.exit(e, out, problem);
    // Every rank has the same command line.
    if (comm::launched_rank() > 0) return code == 0 ? 0 : leave_after_rank_0();
    std::fputs(out.str().c_str(), stdout);
    std::fputs(bounded_lines(message_text(problem.str())).c_str(), stderr);
    return code == 0 ? 0 : static_cast<int>(Exit::usage);
  }
  return line.exit_code();
}

}  // namespace
}  // namespace nrl::app

int main(int argc, char** argv) {
  nrl::cpu::silence_hwloc_without_sysfs();
  try {
    nrl::cpu::prepare_openmp(argv);
    nrl::cpu::arrange_heap();
    return nrl::app::run(argc, argv);
  } catch (const std::exception& e) {
    const nrl::Error error = nrl::error_from(e);
    // Every rank has the same command line.
    if (error.code() == nrl::Exit::usage && nrl::comm::launched_rank() > 0)
      return nrl::app::leave_after_rank_0();
    nrl::log::error_text(error.what());
    return static_cast<int>(error.code());
  }
}
