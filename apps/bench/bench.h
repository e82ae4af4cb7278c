#pragma once
// Benchmarks of this machine, beside its limits (`nrl-train bench`). Every function returns the exit code of
// the process; errors are thrown as nrl::Error.

#include <string>
#include <vector>

#include "parallel/comm/world/world.h"

namespace nrl::bench {

struct Args {
  std::string what;                    ///< ops, gemm, attention, step, comm
  std::string config;                  ///< step only: a YAML file
  std::vector<std::string> overrides;  ///< step only: "key=value"
  std::string device = "auto";         ///< auto, cpu or cuda
  std::string precision = "auto";      ///< of activations, not for step: auto, float32 or bfloat16
  std::string json;                    ///< file to write; empty: none
  std::string only;                    ///< part of the names of what is measured; empty: all
  int steps = 20;                      ///< step: those that are timed
  bool quick = false;                  ///< tiny sizes, timed once: shows that all runs, measures nothing
};

/// Memory-bound kernels, beside the bandwidth of a copy.
int ops(const Args& args);
/// Linear layers, beside the peak.
int gemm(const Args& args);
/// Attention, beside the peak.
int attention(const Args& args);
/// Training steps of a configuration on random tokens, in a world of one rank. `process_start`: wall-clock
/// seconds when the process was started.
int step(comm::World& world, const Args& args, double process_start);
/// Communication among the ranks of the world, in host memory.
int comm(comm::World& world, const Args& args);

}  // namespace nrl::bench
