#pragma once
// Names the tensor of a non-finite step that was the first one, over all ranks.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "apps/engine/nan_search.h"
#include "apps/train/start/run.h"

namespace nrl::train {

/// The value of monitoring.nan_check; auto: all on a CPU, loss on a GPU.
NanCheck nan_check(const Config& config, bool gpu);

/// The first of what the ranks found, as a sentence. `found`: by rank, JSON of engine::BadTensor or empty.
/// `hosts`: by rank. Empty: no rank found any.
std::string first_bad_tensor(std::span<const std::string> found, std::span<const std::string> hosts,
                             int64_t microbatches);

/// Searches the last step of the run, which was skipped and is collected, as `level` says. Collective. The
/// result, for rank 0, is what was found; "not reproduced: ..." if the step is finite when it is repeated.
/// `loss`: of the step.
std::string search_nan(Run& run, NanCheck level, int64_t step, double loss, double grad_norm);

}  // namespace nrl::train
