#pragma once
// policy.recompute: auto. Chooses what a rank recomputes so that its plan fits into a memory budget: one part
// of a block after another, by the bytes that it saves per predicted second.

#include <span>
#include <vector>

#include "apps/plan/step_times.h"

namespace nrl::plan {

/// A further part of blocks that is recomputed: of one block, or of those in the same place of all chunks
/// that take their stashes from one pool, which they would not with different parts.
struct RecomputeChoice {
  std::vector<int> blocks;
  model::RecomputeRule rule;      ///< of the blocks from then on
  double bytes = 0, seconds = 0;  ///< of a microbatch in all blocks: saved, and spent on recomputation
  double bytes_per_second = 0;    ///< at most as high as in the blocks' previous choice
};

/// All choices beyond `base` (by block of the model), the best first; of equal blocks, lower ones first,
/// whose activations are kept the longest. Slots that are moved to the host count no memory. `whole`:
/// includes choices of whole blocks. `times`: of the decoder's tables.
std::vector<RecomputeChoice> recompute_choices(const model::Decoder& decoder, const StepTimes& times,
                                               const std::vector<model::RecomputeRule>& base,
                                               const std::vector<model::OffloadRule>& offload, bool whole);

/// Bytes of all stashes after these choices, of the last one only for its first `of_last` blocks. `kept`: of
/// a microbatch, before any choice.
double bytes_in_flight(const pipeline::Stashes& stashes, const model::ModelLayout& layout, int64_t layers,
                       std::span<const model::Decoder::BlockBytes> kept,
                       std::span<const RecomputeChoice> choices, size_t of_last);

/// Predicted seconds of the forward pass of the blocks.
double forward_seconds(const StepTimes& times);

}  // namespace nrl::plan
