#pragma once
// Keys and variables that have no effect in a run: what the option table cannot know.

#include "apps/model/spec.h"
#include "core/config/load.h"

namespace nrl::train {

/// A warning if OMP_NUM_THREADS would give the threads, but is no number of threads.
void check_threads_variable(const ConfigResult& result, Diagnostics& out);

/// NeMo RL's variables for Nsight Systems, which a training run would ignore: errors.
void check_profiler_variables(Diagnostics& out);

/// Keys of experts that need other keys of experts, of the model or of the ranks.
void check_expert_keys(const ConfigResult& result, const model::ModelSpec& spec, Diagnostics& out);

/// A memory.max_memory that limits no choice of a run. Where that is a warning, it gets its default.
void check_memory_limit(ConfigResult& result);

/// A share of the optimizer state that is too small to move any of it on `world` ranks. The configuration
/// must have no other problems.
void check_offloaded_share(const ConfigResult& result, const model::ModelSpec& spec, int world,
                           Diagnostics& out);

}  // namespace nrl::train
