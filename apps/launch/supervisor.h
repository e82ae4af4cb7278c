#pragma once
// Starts a run again after failures, from outside of it: the processes of a dead MPI job cannot.

#include <string>
#include <vector>

#include "apps/launch/launcher.h"

namespace nrl::launch {

struct Options {
  Launcher launcher;
  std::vector<std::string> arguments;  ///< of the program: a configuration and its overrides
  int ranks = 0;                       ///< 0: as many as the launcher starts (srun)
  std::vector<std::string> hosts;      ///< in use, by number of the node; empty: this host, or the Slurm job
  std::vector<std::string> spares;
  int max_restarts = 100;
  double grace_seconds = 60;  ///< from a request to stop to the end of the processes
  std::string log_dir, checkpoint_dir;
  double network_timeout_seconds = 30;  ///< reliability.network_timeout_seconds
};

/// Runs attempts until the policy ends them; returns the exit code of the last one, or 75 if the same command
/// can go on: the run was stopped, or lacks a host. Prints a line for each decision. Blocks signals
/// (block_signals()). Error(Exit::cannot_create) if another supervisor has the log directory;
/// Error(Exit::unavailable) if the launcher cannot be started.
int supervise(const Options& options);

}  // namespace nrl::launch
