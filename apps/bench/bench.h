#pragma once
// Benchmarks of this machine, relative to its limits (`nrl-train bench`). Every function returns the exit
// code of the process; errors are thrown as nrl::Error.

#include <optional>
#include <string>
#include <vector>

#include "parallel/comm/world/world.h"

namespace nrl::bench {

constexpr int default_steps = 20;  ///< timed without Args::steps

struct Args {
  std::string benchmark;               ///< ops, gemm, attention, step, generate, comm, ...
  std::string suite;                   ///< of compare: a YAML file
  std::string config;                  ///< of step, generate, comm, ...: a YAML file
  std::vector<std::string> overrides;  ///< "key=value"
  std::string device = "auto";         ///< auto, cpu or cuda
  std::string precision = "auto";      ///< of activations, not for step: auto, float32, bfloat16, float16
  std::vector<int64_t> batches;        ///< generate: numbers of sequences; empty: 1 and 16
  std::optional<int64_t> prompt_tokens, new_tokens;  ///< generate: of each sequence
  std::string json;                                  ///< file to write; empty: none
  std::string history;            ///< step, compare: file that gets the figures as lines; empty: none
  std::string commit;             ///< of history: what was measured; empty: the version
  std::string only;               ///< substring of the names of the cases or comparisons; empty: all
  std::string page;               ///< compare: file for the page of the results; empty: none
  std::vector<std::string> with;  ///< compare: other results for the page, files
  std::optional<int> steps;       ///< step, compare, overhead: number of timed steps
  std::optional<int> pairs;       ///< overhead: pairs of blocks
  int64_t tokens = 0;             ///< ops: rows of activations; 0: the default of the device
  std::string out;                ///< calibrate: file of the profile
  std::optional<int> ranks;       ///< calibrate: of the layout; unset: those that are started
  bool links = false;             ///< calibrate: times operations between the ranks that are started
  std::string predict;            ///< step: name of a GPU (device_models.h); empty: no prediction
  std::string profile;            ///< step: log directory for a window of recorded steps; empty: none
  bool roofline = false;          ///< step on a CPU: the limit of each kernel
  bool quick = false;             ///< tiny sizes, executed once: a functional test
};

/// Memory-bound kernels, relative to the bandwidth of a copy.
int ops(const Args& args);
/// Linear layers, relative to peak FLOP/s.
int gemm(const Args& args);
/// Attention, relative to peak FLOP/s.
int attention(const Args& args);
/// Training steps of a configuration on random tokens, seen from rank 0. `process_start`: wall-clock time of
/// the exec of the process. With Args::predict, in a world of one rank, the estimated time of its parts is
/// printed too; without that GPU in this machine nothing else. With Args::roofline the kernels of a step
/// beside the limits of this machine. With Args::profile as many steps more are recorded (train::Capture).
int step(comm::World& world, const Args& args, double process_start);
/// Generation with random weights for the model of a configuration: prefill and decode tokens per second, the
/// latter beside the time that a copy of as many bytes would take.
int generate(const Args& args);
/// Communication in each kind of groups: of the configuration's layout, or inside and across nodes, which is
/// of host memory unless Args::device is cuda. Names groups that are slower than others of their kind.
int comm(comm::World& world, const Args& args);
/// Writes a profile (machine::Profile) of the calls of some ranks of a configuration's layout, each alone on
/// this device, and with Args::links of the operations between the ranks that are started.
int calibrate(comm::World& world, const Args& args);

}  // namespace nrl::bench
