// nrl-train launch: a supervisor that starts a run, and starts it again after failures.

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/launch/supervisor.h"
#include "apps/nrl-train/commands.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/config/load.h"
#include "core/io/atomic_file.h"
#include "parallel/comm/world/world.h"

namespace nrl::app {
namespace {

struct LaunchArgs {
  ConfigArgs config;
  std::string launcher, hosts;
  int ranks = 0, ranks_per_node = 0, spares = 0, max_restarts = 100;
  double grace = 60;
};

// Divides the hosts of the file into those in use and spares, and settles the number of ranks.
void settle_hosts(const LaunchArgs& args, launch::Options& options) {
  if (args.hosts.empty()) {
    if (args.spares > 0) fail(Exit::usage, "--spares takes hosts of --hosts FILE, which is missing");
    if (args.ranks_per_node > 0 && args.launcher != "srun")
      fail(Exit::usage, "--ranks-per-node has no effect without --hosts FILE. Fix: use --ranks");
    options.ranks = args.ranks > 0 || args.launcher == "srun" ? args.ranks : 1;
    return;
  }
  int slots = 0;
  std::vector<std::string> all = launch::hosts_from(read_file(args.hosts, 16 << 20), args.hosts, &slots);
  const auto used = static_cast<int>(all.size()) - args.spares;
  if (used < 1)
    fail(Exit::usage, "--spares {}: {} has {} hosts, so that none is left to use", args.spares, args.hosts,
         all.size());
  int& per_node = options.launcher.ranks_per_node;
  per_node = args.ranks_per_node > 0                    ? args.ranks_per_node
             : args.ranks > 0 && args.ranks % used == 0 ? args.ranks / used
             : args.ranks > 0                           ? 0
             : slots > 0                                ? slots
                                                        : 1;
  options.ranks = args.ranks > 0 ? args.ranks : per_node * used;
  if (per_node * used != options.ranks)
    fail(Exit::usage, "{} ranks do not divide into {} hosts{}", options.ranks, used,
         args.ranks_per_node > 0 ? fmt::format(" of {}", per_node) : "");
  options.spares.assign(all.begin() + used, all.end());
  all.resize(static_cast<size_t>(used));
  options.hosts = std::move(all);
}

int run_launch(const LaunchArgs& args) {
  if (comm::launched_with_peers())
    fail(Exit::usage, "nrl-train launch starts the ranks itself. Fix: run it without mpirun or srun");
  // Only the places of the files: the ranks check the rest.
  const ConfigResult config = load_config(args.config.path, args.config.overrides);
  if (!config.ok()) {
    std::fputs(render(config.diagnostics).c_str(), stderr);
    return static_cast<int>(config.exit_code());
  }
  launch::Options options;
  options.launcher.program = std::filesystem::read_symlink("/proc/self/exe").string();
  settle_hosts(args, options);
  options.launcher.text = args.launcher;
  if (args.launcher.empty() && (options.ranks > 1 || !options.hosts.empty()))
    options.launcher.text = "mpirun";
  options.arguments = {args.config.path};
  options.arguments.insert(options.arguments.end(), args.config.overrides.begin(),
                           args.config.overrides.end());
  options.max_restarts = args.max_restarts;
  options.grace_seconds = args.grace;
  options.log_dir = config.config.logger.log_dir;
  options.checkpoint_dir = config.config.checkpointing.checkpoint_dir;
  options.network_timeout_seconds = config.config.reliability.network_timeout_seconds;
  return launch::supervise(options);
}

}  // namespace

void add_launch(CommandLine& line) {
  const auto args = std::make_shared<LaunchArgs>();
  CLI::App* c = line.add(
      "launch", "Train, and start again after failures",
      "  nrl-train launch --ranks 8 -- run.yaml\n"
      "  nrl-train launch --hosts hosts.txt --ranks-per-node 8 --spares 1 -- run.yaml "
      "policy.optimizer.lr=1e-4\n"
      "  nrl-train launch --launcher srun -- run.yaml                     in a Slurm job\n"
      "  nrl-train launch --launcher 'mpiexec -n {ranks} -f {hostfile}' --hosts hosts.txt -- run.yaml");
  c->add_option("--launcher", args->launcher,
                "mpirun (default with several ranks), srun, or words with {ranks}, {hosts} and {hostfile}");
  c->add_option("--hosts", args->hosts, "File of hosts, one a line, as for mpirun: HOST or HOST slots=N");
  c->add_option("--ranks-per-node", args->ranks_per_node, "Default: slots of the hosts, or 1")
      ->check(CLI::Range(1, 4096));
  c->add_option("--ranks", args->ranks, "Default: ranks per node x hosts in use, or 1")
      ->check(CLI::Range(1, 1 << 20));
  c->add_option("--spares", args->spares, "The last S hosts wait to replace others")
      ->check(CLI::Range(0, 100000));
  c->add_option("--max-restarts", args->max_restarts, "Default: 100")->check(CLI::Range(0, 1000000));
  c->add_option("--grace", args->grace, "Seconds from SIGTERM to the end of the processes (60)")
      ->check(finite_range(0, 1e6));
  for (const auto& [name, reason] : {std::pair("--elastic", "a run keeps its number of ranks"),
                                     {"--relayout", "a run keeps its layout"},
                                     {"--replace-slow", "slow nodes are reported, and replaced by nobody"},
                                     {"--min-nodes", "a run keeps its number of ranks"}})
    c->add_flag_function(
         name,
         [name = std::string(name), reason = std::string(reason)](int64_t) {
           fail(Exit::usage, "{} is not supported: {}. Fix: use --spares", name, reason);
         },
         "Not supported")
        ->group("");
  add_config(c, args->config);
  line.on(c, [args] { return run_launch(*args); });
}

}  // namespace nrl::app
