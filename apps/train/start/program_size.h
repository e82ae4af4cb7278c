#pragma once
// The size of this program in memory, for the plan of host memory.

#include "core/config/config.h"

namespace nrl::train {

/// Resident bytes of this process, without free memory of its heap, after it has trained a tiny model for two
/// steps on a CPU and run the GEMM that measures the peak: the program and its libraries, the code that these
/// generate, threads, and what was allocated before (the configuration, a plan). `config` gives the
/// precision.
int64_t measure_program(const Config& config, int threads);

}  // namespace nrl::train
