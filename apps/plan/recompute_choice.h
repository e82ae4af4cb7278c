#pragma once
// policy.recompute: auto. What a rank recomputes so that its plan fits into a budget of memory: one part of a
// block after another, those first that save most bytes per predicted time.

#include "apps/plan/step_times.h"

namespace nrl::plan {

/// A further part of a block that is recomputed.
struct RecomputeChoice {
  int block = 0;
  model::RecomputeRule rule;      ///< of the block from then on
  double bytes = 0, seconds = 0;  ///< of a microbatch: saved, and spent again
  double bytes_per_second = 0;    ///< not above that of the block's previous choice
};

/// All choices beyond `base` (by block of the model), the best first; of equal blocks, lower ones first,
/// whose activations are kept the longest. What is moved to the host takes no memory. `whole`: also of whole
/// blocks. `times`: of the decoder's tables.
std::vector<RecomputeChoice> recompute_choices(const model::Decoder& decoder, const StepTimes& times,
                                               const std::vector<model::RecomputeRule>& base,
                                               const std::vector<model::OffloadRule>& offload, bool whole);

/// Predicted seconds of the forward pass of the blocks.
double forward_seconds(const StepTimes& times);

}  // namespace nrl::plan
