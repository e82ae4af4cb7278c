#pragma once
// nrl-train tune kernels: the kernels that steps of a configuration run fastest with.

#include <string>
#include <vector>

#include "parallel/comm/world/world.h"

namespace nrl::tune {

struct KernelArgs {
  std::string config;                  ///< a YAML file
  std::vector<std::string> overrides;  ///< "key=value"
  int rounds = 3;                      ///< in which all choices are timed in turn
  int steps = 5;                       ///< timed in each round
  std::string json;                    ///< file to write; empty: none
};

/// Collective. Times steps on random tokens: on a CPU with the kernels of each instruction set of all ranks'
/// processors; on a GPU with the library's GEMMs and with timed ones (kernels.autotune), whose choices stay
/// in kernels.gemm_tuning or LOG_DIR, with a table of the GEMMs whose choice is another one. Prints the key
/// to write. Returns the exit code.
int tune_kernels(comm::World& world, const KernelArgs& args);

}  // namespace nrl::tune
