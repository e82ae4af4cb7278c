#pragma once
// Starts the ranks of a run under Nsight Systems.

#include <string>
#include <vector>

#include "apps/nrl-train/commands.h"
#include "core/config/nsys.h"

namespace nrl::app {

/// The command line of `nsys` for a window. `extra`: NRL_NSYS_EXTRA_OPTIONS, a JSON object of options without
/// their dashes and of their values; empty: none. `program`: this program and its arguments. Throws Error
/// (`usage`) for other extra options.
std::vector<std::string> nsys_command(const NsysWindow& window, const std::string& log_dir,
                                      const std::string& extra, const std::vector<std::string>& program);

/// Must be called before MPI starts, in every rank of a training run. Replaces this process by `nsys profile`
/// of itself if the environment or the configuration asks for it, this rank's name matches, the run is on a
/// GPU, and no profiler runs it yet. Throws Error: `unavailable` if there is no nsys on PATH.
void start_under_nsys(const ConfigArgs& args);

}  // namespace nrl::app
